// How a bucket is cut into shards and granules.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/types.hpp"
#include "protocol/ops/epochs.hpp"

namespace tailcut {

// A bucket is cut into one shard per rank, by the weights of their owners and up to a granule. Owners of one weight
// have shards of one length. A shard has at least one granule, so that a shard without coordinates is announced,
// delivered and answered like any other; but that of an owner without weight has none, and nobody waits for it.
struct Layout {
    std::uint32_t bucket_len = 0;
    Rank ranks = 1;
    const OwnerWeights* weights = nullptr;  // null: all alike
    Rank rotation = 0;                      // the owner of shard 0

    // The length of the longest shard, unless the bucket ends before.
    std::uint64_t shard_stride() const {
        const std::uint64_t heaviest = weights ? weights->heaviest() : 1;
        const std::uint64_t total = weights ? weights->total() : ranks;
        return whole_granules(bucket_len * heaviest, total);
    }
    std::uint64_t begin(Rank shard) const {
        const std::uint64_t at =
            weights ? whole_granules(weights->of_first(rotation, shard) * shard_stride(), weights->heaviest())
                    : shard * shard_stride();
        return std::min<std::uint64_t>(at, bucket_len);
    }
    std::uint32_t length(Rank shard) const {
        return static_cast<std::uint32_t>(begin(static_cast<Rank>(shard + 1)) - begin(shard));
    }
    bool owned(Rank shard) const {
        return !weights || weights->of_first(static_cast<Rank>((rotation + shard) % ranks), 1) > 0;
    }
    std::uint32_t granules(Rank shard) const {
        if (!owned(shard)) return 0;
        return std::max(1u,
                        static_cast<std::uint32_t>((std::uint64_t{length(shard)} + kGranule - 1) / kGranule));
    }
    // Coordinates of the granules [first, last) of a shard.
    std::uint32_t coords(Rank shard, std::uint32_t first, std::uint32_t last) const {
        const std::uint64_t len = length(shard);
        return static_cast<std::uint32_t>(std::min(len, std::uint64_t{last} * kGranule) -
                                          std::min(len, std::uint64_t{first} * kGranule));
    }
    std::uint64_t shard_bytes() const { return shard_stride() * sizeof(float); }

private:
    // A fraction, rounded up to a granule.
    static std::uint64_t whole_granules(std::uint64_t numerator, std::uint64_t denominator) {
        const std::uint64_t unit = denominator * kGranule;
        return (numerator + unit - 1) / unit * kGranule;
    }
};

}  // namespace tailcut
