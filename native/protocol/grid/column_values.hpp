// How values travel in a column of a grid: contributions are sums with weights, and the mean is Σ sums / Σ weights.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "protocol/values/values.hpp"

namespace tailcut {

// What the values of a column's ops share with the grid, by op.
struct ColumnOps {
    std::map<Seq, std::vector<float>>
        weights;  // of the own sums, by granule of the bucket: from before the entry on
    std::map<Seq, std::vector<std::uint8_t>>
        planes;  // by shard: with which rows send its mean on; 0: not known

    void note_planes(Seq seq, Rank shard, int number) {
        const auto op = planes.find(seq);
        if (op != planes.end()) op->second[shard] = static_cast<std::uint8_t>(number);
    }
    std::uint8_t planes_of(Seq seq, Rank shard) const {
        const auto op = planes.find(seq);
        return op != planes.end() ? op->second[shard] : std::uint8_t{0};
    }
    void end(Seq seq) {  // ops need not end in order
        weights.erase(seq);
        planes.erase(seq);
        planes.erase(planes.begin(), planes.lower_bound(weights.empty() ? seq : weights.begin()->first));
    }
};

std::unique_ptr<Values> make_column_values(ColumnOps& ops, bool elided);

}  // namespace tailcut
