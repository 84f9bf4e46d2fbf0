// What an endpoint is told when it begins, and what never changes after.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "protocol/ops/ownership.hpp"
#include "protocol/ops/terms.hpp"
#include "protocol/sending/flight.hpp"
#include "wire/header.hpp"

namespace tailcut {

// Who hears our multicast, and the path to all of them. Without members there is none.
struct MulticastSettings {
    std::vector<Rank> members;
    PeerSettings path;  // with the least of what the members grant; pool_bytes is not looked at
};

struct Settings {
    Shape shape;
    std::uint64_t group_tag = 0;
    Seq window_ops = 64;                    // W of rule 3
    wire::Codec codec = wire::Codec::kRaw;  // of all ranks
    std::size_t pool_bytes = 0;
    std::uint32_t window_bytes = 0;  // each sender's share of our socket buffer
    Terms terms;                     // of ops that this rank has not entered
    MulticastSettings multicast;
    Seq first_seq = 0;
    bool resend = true;  // what was lost, while its stage is open
    bool record_fates = false;
    Rank rows = 1;        // of a grid; 1: a flat group
    bool elided = false;  // simulations only: packets without values
};

}  // namespace tailcut
