// The ranks that hear a rank's multicast. Members have an index of their own, so that a set of them takes a
// few words.
#pragma once

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/types.hpp"
#include "protocol/sending/arrivals.hpp"

namespace tailcut {

struct Audience {
    static constexpr std::size_t kMost = 256;  // further ranks are served by unicast
    using Set = std::bitset<kMost>;

    Audience() = default;
    Audience(Rank group_size, std::vector<Rank> members) : ranks(std::move(members)) {
        if (ranks.size() > kMost) ranks.resize(kMost);
        if (!ranks.empty()) indices.assign(group_size, -1);
        for (std::size_t k = 0; k < ranks.size(); ++k) {
            indices[ranks[k]] = static_cast<std::int16_t>(k);
            present.set(k);
        }
    }
    int index(Rank rank) const { return rank < indices.size() ? indices[rank] : -1; }  // -1: not a member

    std::vector<Rank> ranks;            // by index
    std::vector<std::int16_t> indices;  // by rank; empty if there are no members
    Set present;                        // members that ops beginning now serve by multicast
};

// The state of a link for the multicast of both of its ranks.
struct MulticastLink {
    Arrivals arrivals;  // of the peer's multicast
    bool feedback_due = false, probe_due = false;
    // For our multicast, if the peer is a member: ops before this one are served by unicast because the peer
    // was too slow or silent.
    Seq from = 0;
    Time left_at = -1;
};

}  // namespace tailcut
