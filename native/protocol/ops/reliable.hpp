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
    for (Rank shard = 0; shard < layout.ranks; ++shard) {
        sets.emplace_back(layout.granules(shard));
        const std::uint64_t begin = layout.begin(shard), end = begin + layout.length(shard);
        const codec::Blocks blocks(layout.length(shard));
        for (const CoordRun& run : runs) {
            const std::uint64_t first = std::max<std::uint64_t>(run.first, begin),
                                last = std::min(std::uint64_t{run.first} + run.count, end);
            if (first >= last) continue;
            sets[shard].set(blocks.of(static_cast<std::uint32_t>(first - begin)).first_granule(),
                            blocks.of(static_cast<std::uint32_t>(last - begin - 1)).last_granule());
        }
    }
    return sets;
}

}  // namespace tailcut
