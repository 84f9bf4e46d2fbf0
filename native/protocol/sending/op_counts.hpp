// How many packets of each op are not settled yet. Few ops are in flight at a time, so a linear search is
// fast enough.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/types.hpp"

namespace tailcut {

class OpCounts {
public:
    void add(Seq seq) {
        if (const auto op = find(seq); op != counts_.end())
            ++op->second;
        else
            counts_.emplace_back(seq, 1);
    }
    void remove(Seq seq) {  // it was added before
        const auto op = find(seq);
        if (--op->second > 0) return;
        *op = counts_.back();
        counts_.pop_back();
    }
    bool any(Seq seq) const {
        return std::any_of(counts_.begin(), counts_.end(), [&](const auto& op) { return op.first == seq; });
    }

private:
    std::vector<std::pair<Seq, std::uint32_t>>::iterator find(Seq seq) {
        return std::find_if(counts_.begin(), counts_.end(), [&](const auto& op) { return op.first == seq; });
    }
    std::vector<std::pair<Seq, std::uint32_t>> counts_;
};

}  // namespace tailcut
