// What row and column of a grid hand to each other: the sum of a row's contributions to a shard, and the mean over all rows.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "codec/planes.hpp"
#include "protocol/ops/layout.hpp"
#include "protocol/ops/memory.hpp"

namespace tailcut {

// What arrived of an owned shard, summed; with planes in the rotated domain, where the mean is taken.
struct RowSum {
    Block block;
    std::vector<float> counts;   // by granule: how many contributions, less what quantization took from them
    std::vector<bool> gaussian;  // planes, by block: whether it is as good as Gaussian

    std::span<float> values() const { return {block.data(), counts.size() * kGranule}; }
};

// A mean as its packets came: whatever row sends it on, it has the same bits.
struct CodedMean {
    struct Packet {
        std::uint32_t first;  // granule of the row's shard
        codec::PlanesHead head;
    };
    std::vector<Packet> packets;
    Block slots;  // by granule: the bytes of the packet that begins there
};

// An op of the column, from its entry to its report.
struct ColumnOp {
    std::uint32_t bucket_len = 0;  // of the row's op
    RowSum sum;                    // raw: the mean is put in its place
    Time due = 0;  // when the row's shard would have closed without all of it: other rows may need as long
    CodedMean mean;
};
using ColumnOps = std::map<Seq, ColumnOp>;

}  // namespace tailcut
