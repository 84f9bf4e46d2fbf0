// The ops of a rank that are under way, in a file that outlives the process (docs/ledger.md). Others may have used what
// a rank decided in an op before it has the op on record, and it may be killed in between. The file is mapped into memory:
// what was put is kept by the kernel, without a call and without waiting for a disk. It is a ring.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "drivers/ledger_frames.hpp"

namespace tailcut {

class OpenOps {
public:
    // The descriptor becomes its own. Throws std::system_error if the disk has no room for so many bytes.
    OpenOps(int descriptor, std::size_t bytes);
    ~OpenOps();
    OpenOps(const OpenOps&) = delete;
    OpenOps& operator=(const OpenOps&) = delete;

    // A payload may come in two parts. One that is larger than the ring is left out.
    void put(LedgerKind kind, std::span<const std::byte> head, std::span<const std::byte> rest);

private:
    std::byte* memory_ = nullptr;
    const std::size_t bytes_;
    std::size_t at_ = 0;
    std::uint64_t number_ = 0;
    std::vector<std::byte> payload_, frame_;  // scratch
};

}  // namespace tailcut
