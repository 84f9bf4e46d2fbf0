// How values travel in a column of a grid: a contribution stands for those of a row, and the mean is over all of them.
#pragma once

#include <memory>

#include "protocol/grid/column_ops.hpp"
#include "protocol/values/values.hpp"

namespace tailcut {

// An op is in `ops` from before its entry until it has ended.
std::unique_ptr<Values> make_column_values(ColumnOps& ops, wire::Codec codec, bool elided);

// As ValuesOf, of what looks at `ops`.
template <typename ItsContributions, typename ItsReduction, typename ItsMeans>
class ColumnValuesOf final : public Values {
public:
    explicit ColumnValuesOf(ColumnOps& ops) : ops_(ops) {}

    std::unique_ptr<Contributions> contributions(const OpContext& context, const Plan& plan,
                                                 const Coding& coding,
                                                 std::span<const float> bucket) override {
        return std::make_unique<ItsContributions>(ops_, context, plan, coding, bucket);
    }
    std::unique_ptr<Reduction> reduction(const OpContext& context, const Plan& plan, const Coding& gather,
                                         Block memory) override {
        return std::make_unique<ItsReduction>(ops_, context, plan, gather, std::move(memory));
    }
    std::unique_ptr<Means> means(const OpContext& context, const Plan& plan, Block memory) override {
        return std::make_unique<ItsMeans>(ops_, context, plan, std::move(memory));
    }

private:
    ColumnOps& ops_;
};

// The end of the run, from `first`, of equal counts.
inline std::uint32_t run_end(const float* counts, std::uint32_t first, std::uint32_t last) {
    const auto other = [&](float count) { return count != counts[first]; };
    return static_cast<std::uint32_t>(std::find_if(counts + first, counts + last, other) - counts);
}

}  // namespace tailcut
