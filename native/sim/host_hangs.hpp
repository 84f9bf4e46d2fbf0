// When the programs of a simulation hang: what a program does takes longer by the time that it hangs in between, and its
// host goes on.
#pragma once

#include <algorithm>
#include <vector>

#include "base/types.hpp"

namespace tailcut::sim {

struct Hang {
    Rank rank;
    Time from, until;
    bool announced = false;  // the program says before that it will enter no op
};

class HostHangs {
public:
    HostHangs(const std::vector<Hang>& hangs, Rank ranks) : by_rank_(ranks) {
        for (const Hang& hang : hangs) by_rank_[hang.rank].push_back(hang);
        for (auto& own : by_rank_)
            std::stable_sort(own.begin(), own.end(),
                             [](const Hang& a, const Hang& b) { return a.from < b.from; });
    }

    // When a rank is done that begins now and takes so long if it does not hang.
    Time done(Rank rank, Time begin, Duration takes) const {
        for (const Hang& hang : by_rank_[rank])
            if (hits(hang, begin, takes)) takes += hang.until - std::max(hang.from, begin);
        return begin + takes;
    }

    // Whether it knows that it will hang meanwhile.
    bool announced(Rank rank, Time begin, Duration takes) const {
        return std::ranges::any_of(
            by_rank_[rank], [&](const Hang& hang) { return hang.announced && hits(hang, begin, takes); });
    }

private:
    static bool hits(const Hang& hang, Time begin, Duration takes) {
        return hang.from <= begin + takes && begin < hang.until;
    }

    std::vector<std::vector<Hang>> by_rank_;
};

}  // namespace tailcut::sim
