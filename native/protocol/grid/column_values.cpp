#include "protocol/grid/column_values.hpp"

#include "protocol/grid/elided_grid_values.hpp"
#include "protocol/grid/part_values.hpp"
#include "protocol/grid/weighted_values.hpp"

namespace tailcut {

std::unique_ptr<Values> make_column_values(ColumnOps& ops, wire::Codec codec, bool elided) {
    if (elided) return make_elided_column_values(ops, codec);
    if (codec == wire::Codec::kPlanes)
        return std::make_unique<ColumnValuesOf<PartContributions, PartReduction, PartMeans>>(ops);
    return std::make_unique<
        ColumnValuesOf<WeightedContributions<RawContributions>, WeightedReduction, ColumnMeansOf<RawMeans>>>(
        ops);
}

}  // namespace tailcut
