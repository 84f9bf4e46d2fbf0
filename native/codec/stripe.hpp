// Packets of one stripe, coded into slots: what a sender does with its bucket and an owner with its mean.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "codec/planes.hpp"
#include "codec/send_order.hpp"

namespace tailcut::codec {

// Room for a granule, wherever packets begin: all planes, and the gains of a packet of one granule.
inline constexpr std::size_t kSlotBytes =
    8 * wire::kMaxPlanes + wire::gain_table_bytes(wire::kMaxPlanes, true);
static_assert(kSlotBytes % sizeof(float) == 0);
inline constexpr std::size_t kSlotFloats = kSlotBytes / sizeof(float);

// The rotated blocks of one stripe. Blocks lie in `z` as they do in the shard.
struct RotatedStripe {
    std::vector<BlockSpan> blocks;
    std::span<float> z;
    std::vector<Scale> scales;  // by block

    std::span<float> block(std::size_t b) const {
        return z.subspan(blocks[b].begin - blocks.front().begin, blocks[b].length);
    }
    bool non_finite() const;
};

// Rotates the stripe of a shard into `z`; the shard may end within its last granule.
RotatedStripe rotate_stripe(std::span<const float> shard, std::vector<BlockSpan> blocks,
                            const BlockKeys& keys, std::span<float> z);

// Codes the runs, each into the slots from its first granule on; `slots` begin with the stripe's first granule. Returns
// what the headers of each block's packets say, but for their granules, and the error of decoding them as a share of the
// block's energy. All packets have gains or none has: packets of equal length travel in one system call.
struct CodedBlock {
    PlanesHead head;
    double noise;
};
std::vector<CodedBlock> encode_stripe(const RotatedStripe& stripe, std::span<const PacketRun> runs,
                                      const BlockKeys& keys, int planes, std::byte* slots);

}  // namespace tailcut::codec
