// How a bucket is cut into shards and granules.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/types.hpp"

namespace tailcut {

// A bucket is cut into one shard per rank, of equal length up to a granule. Every shard has at least one
// granule, so that a shard without coordinates is announced, delivered and answered like any other.
struct Layout {
    std::uint32_t bucket_len = 0;
    Rank ranks = 1;

    std::uint64_t shard_stride() const {
        const std::uint64_t share = (std::uint64_t{bucket_len} + ranks - 1) / ranks;
        return (share + kGranule - 1) / kGranule * kGranule;
    }
    std::uint64_t begin(Rank shard) const {
        return std::min<std::uint64_t>(shard * shard_stride(), bucket_len);
    }
    std::uint32_t length(Rank shard) const {
        return static_cast<std::uint32_t>(std::min<std::uint64_t>(shard_stride(), bucket_len - begin(shard)));
    }
    std::uint32_t granules(Rank shard) const {
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
};

}  // namespace tailcut
