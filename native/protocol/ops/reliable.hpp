// Which coordinates of a bucket are reliable: their blocks are waited for beyond the bounds of their op.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "codec/blocks.hpp"
#include "protocol/ops/granules.hpp"
#include "protocol/ops/layout.hpp"
#include "protocol/ops/terms.hpp"

namespace tailcut {

// By shard: the granules of the blocks that hold a coordinate of these runs. Empty if there are no runs.
inline std::vector<GranuleSet> reliable_granules(const Layout& layout, std::span<const CoordRun> runs) {
    std::vector<GranuleSet> sets;
    if (runs.empty() || layout.bucket_len == 0) return sets;
    for (Rank shard = 0; shard < layout.ranks; ++shard) sets.emplace_back(layout.granules(shard));
    for (const CoordRun& run : runs) {
        const std::uint64_t last =
            std::min<std::uint64_t>(std::uint64_t{run.first} + run.count, layout.bucket_len);
        for (std::uint64_t first = run.first; first < last;) {
            const auto shard = static_cast<Rank>(first / layout.shard_stride());
            const std::uint64_t begin = layout.begin(shard),
                                end = std::min(last, begin + layout.length(shard));
            const codec::Blocks blocks(layout.length(shard));
            sets[shard].set(blocks.of(static_cast<std::uint32_t>(first - begin)).first_granule(),
                            blocks.of(static_cast<std::uint32_t>(end - begin - 1)).last_granule());
            first = end;
        }
    }
    return sets;
}

}  // namespace tailcut
