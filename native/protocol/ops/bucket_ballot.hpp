// The buckets that the ranks state for one op, and which of them the op serves (rule 11).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "protocol/ops/ownership.hpp"

namespace tailcut {

class BucketBallot {
public:
    enum class Verdict { kOpen, kServed, kRefused };

    explicit BucketBallot(Rank ranks) : buckets_(ranks), voted_(ranks) {}

    // Returns whether this is the rank's first vote; a rank cannot change its mind.
    bool vote(Rank rank, BucketId bucket) {
        if (voted_[rank]) return false;
        voted_[rank] = true;
        buckets_[rank] = bucket;
        unanimous_ = votes_ == 0 || (unanimous_ && bucket == first_);
        if (votes_++ == 0) first_ = bucket;
        return true;
    }
    bool against(Rank rank, BucketId bucket) const { return voted_[rank] && buckets_[rank] != bucket; }

    // A strict majority's bucket is served, and ranks with another one get an error. Without a majority,
    // every rank gets one. `last_call`: no more votes can be waited for.
    Verdict judge(BucketId bucket, bool last_call) const {
        if (unanimous_ && bucket == first_) return Verdict::kServed;
        const std::size_t mine = votes_for(bucket);
        if (2 * mine > voted_.size()) return Verdict::kServed;
        std::size_t rival = 0;
        for (Rank rank = 0; rank < voted_.size(); ++rank)
            if (against(rank, bucket)) rival = std::max(rival, votes_for(buckets_[rank]));
        if (2 * rival > voted_.size() || votes_ == voted_.size()) return Verdict::kRefused;
        if (!last_call) return Verdict::kOpen;
        return mine > rival ? Verdict::kServed : Verdict::kRefused;
    }

    const std::vector<BucketId>& buckets() const { return buckets_; }
    const std::vector<bool>& voted() const { return voted_; }

private:
    std::size_t votes_for(BucketId bucket) const {
        std::size_t n = 0;
        for (Rank rank = 0; rank < voted_.size(); ++rank) n += voted_[rank] && buckets_[rank] == bucket;
        return n;
    }

    std::vector<BucketId> buckets_;  // by rank
    std::vector<bool> voted_;        // by rank
    std::size_t votes_ = 0;
    BucketId first_;
    bool unanimous_ = false;
};

}  // namespace tailcut
