// The file of a rank's ledger, and the thread that appends to it (docs/ledger.md). It keeps its own thread and no lock
// of Python's, so that a disk costs records and never a step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/types.hpp"
#include "drivers/ledger_frames.hpp"

namespace tailcut {

class LedgerFile {
public:
    // The descriptor becomes its own. Records beyond `most_waiting_bytes` that wait for the disk are left out.
    LedgerFile(int descriptor, std::size_t most_waiting_bytes);
    ~LedgerFile();
    LedgerFile(const LedgerFile&) = delete;
    LedgerFile& operator=(const LedgerFile&) = delete;

    // Returns at once. A payload may come in two parts.
    void append(LedgerKind kind, std::span<const std::byte> head, std::span<const std::byte> rest = {});

    struct Progress {
        std::size_t waiting_records = 0;
        std::uint64_t left_out = 0;  // records since the last that was written
        std::string problem;         // the latest reason to leave records out; empty: there was none
    };
    Progress progress() const;

    // Writes what waits and closes the file. Returns false if that takes longer, and goes on in the background.
    bool close(Duration limit);

private:
    struct State;
    std::shared_ptr<State> state_;  // also the thread's, which a disk may hold longer than we live
};

}  // namespace tailcut
