// The types that every layer shares: time, ranks, ops, granules, and randomness that is derived from an
// address.
#pragma once

#include <cstdint>
#include <limits>

namespace tailcut {

using Time = std::int64_t;      // nanoseconds of whatever clock the driver uses
using Duration = std::int64_t;  // nanoseconds
using Rank = std::uint16_t;
using Seq = std::uint32_t;     // number of an op within its group
using Ticket = std::uint64_t;  // identifies one submitted op to the caller

inline constexpr Time kNever = std::numeric_limits<Time>::max();
inline constexpr Duration kMicrosecond = 1'000;
inline constexpr Duration kMillisecond = 1'000'000;
inline constexpr std::uint32_t kGranule = 64;  // coordinates; arrivals are recorded per granule

// A counter-based generator (splitmix64): every random value is a function of its address.
constexpr std::uint64_t mix(std::uint64_t x) {
    x += 0x9E3779B97F4A7C15;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
}

}  // namespace tailcut
