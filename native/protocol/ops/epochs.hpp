// Agreements on who owns how much (rule 7). An epoch holds from its first op on, until a later one begins. The
// ranks agree on it elsewhere; here is what an endpoint was told.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <iterator>
#include <optional>
#include <utility>
#include <vector>

#include "base/types.hpp"

namespace tailcut {

// How much each rank owns, relative to the others. The ranks are taken in a circle from any of them on.
class OwnerWeights {
public:
    // By rank; at least one is above 0.
    explicit OwnerWeights(const std::vector<std::uint16_t>& weights)
        : heaviest_(*std::max_element(weights.begin(), weights.end())) {
        sums_.reserve(2 * weights.size() + 1);
        for (std::size_t k = 0; k < 2 * weights.size(); ++k)
            sums_.push_back(sums_.back() + weights[k % weights.size()]);
    }

    std::uint64_t heaviest() const { return heaviest_; }
    std::uint64_t total() const { return sums_[sums_.size() / 2]; }
    // Of so many ranks from this one on.
    std::uint64_t of_first(Rank from, Rank count) const {
        return sums_[std::size_t{from} + count] - sums_[from];
    }

private:
    std::uint64_t heaviest_;
    std::vector<std::uint64_t> sums_{0};  // of the ranks before, twice around
};

struct Epoch {
    std::uint16_t number = 0;
    Seq first_seq = 0;
    std::optional<OwnerWeights> weights;  // none: all own alike
    std::vector<bool> members;            // by rank; empty: all are

    const OwnerWeights* owners() const { return weights ? &*weights : nullptr; }
    bool member(Rank rank) const { return members.empty() || members[rank]; }
    Rank member_count(Rank ranks) const {
        return members.empty() ? ranks : static_cast<Rank>(std::count(members.begin(), members.end(), true));
    }
};

inline const Epoch kFirstEpoch{};

// Epochs are few, and all are kept: plans of old ops point to theirs.
class Epochs {
public:
    const Epoch& latest() const { return epochs_.back(); }
    const Epoch& at(Seq seq) const {
        auto epoch = epochs_.rbegin();
        while (epoch->first_seq > seq && std::next(epoch) != epochs_.rend()) ++epoch;
        return *epoch;
    }
    // Returns false, and nothing changes, if this one or a later one is known.
    bool add(Epoch epoch) {
        if (epoch.number <= latest().number) return false;
        epochs_.push_back(std::move(epoch));
        return true;
    }

    // The latest that anybody has spoken of.
    std::uint16_t heard() const { return std::max(heard_, latest().number); }
    void hear(std::uint16_t number) { heard_ = std::max(heard_, number); }

private:
    std::deque<Epoch> epochs_ = std::deque<Epoch>(1);
    std::uint16_t heard_ = 0;
};

}  // namespace tailcut
