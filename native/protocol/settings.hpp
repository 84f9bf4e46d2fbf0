// What an endpoint is told when it begins. None of it changes afterwards.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "protocol/ops/ownership.hpp"
#include "protocol/ops/terms.hpp"
#include "protocol/sending/flight.hpp"
#include "wire/header.hpp"

namespace tailcut {

// The ranks that hear our multicast, and the path to all of them. Without members there is no multicast.
struct MulticastSettings {
    std::vector<Rank> members;
    PeerSettings path;  // the least of what the members grant; pool_bytes is not used
};

struct Settings {
    Shape shape;
    std::uint64_t group_tag = 0;
    Seq window_ops = 64;                    // W of rule 3
    wire::Codec codec = wire::Codec::kRaw;  // the same on all ranks
    std::size_t pool_bytes = 0;
    std::uint32_t window_bytes = 0;  // each sender's share of our socket buffer
    Terms terms;                     // of ops that this rank has not entered
    MulticastSettings multicast;
    Seq first_seq = 0;
    bool resend = true;    // send lost packets again while their stage is open
    bool carry = true;     // rule 9: what is late for a bucket with a key enters its next op
    bool stand_in = true;  // a share of the own gradient stands in for a late mean; off in tests only
    bool attendance =
        true;  // SCATTER awaits only ranks that were on time before; else all that are not silent
    bool record_fates = false;
    Rank rows = 1;        // rows of a grid; 1: a flat group
    bool elided = false;  // simulations only: packets carry no values

    // What is late is kept for fewer ops than means are: it takes more memory, and an owner that was away for
    // long must not apply all of that time at once.
    Seq late_ops() const { return std::max(std::min<Seq>(window_ops, 64), window_ops / 16); }
};

}  // namespace tailcut
