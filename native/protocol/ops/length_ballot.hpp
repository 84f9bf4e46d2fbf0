// The bucket lengths that the ranks state for one op, and which length the op serves (rule 11).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/types.hpp"

namespace tailcut {

class LengthBallot {
public:
    enum class Verdict { kOpen, kServed, kRefused };

    explicit LengthBallot(Rank ranks) : lengths_(ranks), voted_(ranks) {}

    // Returns whether this is the rank's first vote; a rank cannot change its mind.
    bool vote(Rank rank, std::uint32_t length) {
        if (voted_[rank]) return false;
        voted_[rank] = true;
        lengths_[rank] = length;
        unanimous_ = votes_ == 0 || (unanimous_ && length == first_);
        if (votes_++ == 0) first_ = length;
        return true;
    }
    bool against(Rank rank, std::uint32_t length) const { return voted_[rank] && lengths_[rank] != length; }

    // A strict majority's length is served, and ranks with another length get an error. Without a majority,
    // every rank gets one. `last_call`: no more votes can be waited for.
    Verdict judge(std::uint32_t length, bool last_call) const {
        if (unanimous_ && length == first_) return Verdict::kServed;
        const std::size_t mine = votes_for(length);
        if (2 * mine > voted_.size()) return Verdict::kServed;
        std::size_t rival = 0;
        for (Rank rank = 0; rank < voted_.size(); ++rank)
            if (against(rank, length)) rival = std::max(rival, votes_for(lengths_[rank]));
        if (2 * rival > voted_.size() || votes_ == voted_.size()) return Verdict::kRefused;
        if (!last_call) return Verdict::kOpen;
        return mine > rival ? Verdict::kServed : Verdict::kRefused;
    }

    const std::vector<std::uint32_t>& lengths() const { return lengths_; }
    const std::vector<bool>& voted() const { return voted_; }

private:
    std::size_t votes_for(std::uint32_t length) const {
        std::size_t n = 0;
        for (Rank rank = 0; rank < voted_.size(); ++rank) n += voted_[rank] && lengths_[rank] == length;
        return n;
    }

    std::vector<std::uint32_t> lengths_;  // by rank
    std::vector<bool> voted_;             // by rank
    std::size_t votes_ = 0;
    std::uint32_t first_ = 0;
    bool unanimous_ = false;
};

}  // namespace tailcut
