// How values travel in a row of a grid: as in a flat group, until an owner has its row's contributions. Then it offers
// their sum, which the column averages, and the column's mean is put in its place.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "protocol/grid/column_ops.hpp"
#include "protocol/values/values.hpp"

namespace tailcut {

// The mean over all rows, as far as the column has brought it.
struct RowMean {
    GranuleSet held;                   // where there is a mean
    std::span<const float> values;     // raw
    const CodedMean* coded = nullptr;  // planes
    // What the column has added to its error, in shares of its energy: by coding sums, by coding the mean, and by what was
    // trimmed.
    double sums_noise = 0, mean_noise = 0, trimmed = 0;
};

class RowReduction {
public:
    virtual ~RowReduction() = default;
    std::optional<RowSum> take_sum() { return std::exchange(sum_, std::nullopt); }  // once, when it is closed
    virtual void put_mean(const RowMean& mean) = 0;  // what it does not hold is EMPTY

protected:
    std::optional<RowSum> sum_;
};

std::unique_ptr<Values> make_row_values(wire::Codec codec, bool elided);

}  // namespace tailcut
