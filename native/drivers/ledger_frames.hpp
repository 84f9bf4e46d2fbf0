// The frames of a ledger's records: each has a marker, a checksum and its number (docs/ledger.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace tailcut {

// kServed: what a rank did as an owner in an op that it has not entered. kOpen: in one that has not ended.
enum class LedgerKind : std::uint8_t {
    kStart = 1,
    kOp = 2,
    kNote = 3,
    kGap = 4,
    kEnd = 5,
    kServed = 6,
    kOpen = 7
};

// Appends marker | checksum of what follows | kind | number | length | payload.
void put_frame(std::vector<std::byte>& to, std::uint64_t number, LedgerKind kind,
               std::span<const std::byte> payload);

}  // namespace tailcut
