// How values travel in a row of a grid: as in a flat group, until an owner has its row's contributions. Then it offers
// their sum, which the column averages, and the column's mean is put in its place.
#pragma once

#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "protocol/values/values.hpp"

namespace tailcut {

// What arrived of an owned shard: its sum, and by granule how many contributions that is, less what quantization took from
// them.
struct RowSum {
    Block block;
    std::vector<float> weights;

    std::span<float> values() const { return {block.data(), weights.size() * kGranule}; }
};

class RowReduction {
public:
    virtual ~RowReduction() = default;
    std::optional<RowSum> take_sum() { return std::exchange(sum_, std::nullopt); }  // once, when it is closed
    // The mean of the granules in `held`; the others are EMPTY. `planes`, by granule, with which every row is to send it;
    // 0: not known.
    virtual void put_mean(std::span<const float> mean, const GranuleSet& held,
                          std::span<const std::uint8_t> planes) = 0;

protected:
    std::optional<RowSum> sum_;
};

std::unique_ptr<Values> make_row_values(wire::Codec codec, bool elided);

}  // namespace tailcut
