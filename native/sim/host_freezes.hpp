// When the hosts of a simulation stand still. It must be asked with times that never decrease.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "base/types.hpp"

namespace tailcut::sim {

struct Freeze {
    Rank rank;
    Time from, until;  // until == kNever: dead
};

class HostFreezes {
public:
    HostFreezes(const std::vector<Freeze>& freezes, Rank ranks) : by_rank_(ranks), at_(ranks) {
        for (const Freeze& freeze : freezes) by_rank_[freeze.rank].push_back(freeze);
        for (auto& own : by_rank_)
            std::stable_sort(own.begin(), own.end(),
                             [](const Freeze& a, const Freeze& b) { return a.from < b.from; });
    }

    bool frozen(Rank rank, Time now) {
        const std::vector<Freeze>& own = by_rank_[rank];
        std::size_t& at = at_[rank];
        while (at < own.size() && own[at].until <= now) ++at;
        return at < own.size() && own[at].from <= now;
    }

    bool dead(Rank rank, Time now) { return frozen(rank, now) && by_rank_[rank][at_[rank]].until == kNever; }

private:
    std::vector<std::vector<Freeze>> by_rank_;
    std::vector<std::size_t> at_;  // by rank: freezes before this one are over
};

}  // namespace tailcut::sim
