// Codes the packets of one stripe into slots. A sender does this with its bucket, an owner with its mean.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "codec/planes.hpp"
#include "codec/send_order.hpp"

namespace tailcut::codec {

// Room for a granule, wherever packets begin: all planes, and the gains of a packet that has only this
// granule.
inline constexpr std::size_t kSlotBytes =
    8 * wire::kMaxPlanes + wire::gain_table_bytes(wire::kMaxPlanes, true);
static_assert(kSlotBytes % sizeof(float) == 0);
inline constexpr std::size_t kSlotFloats = kSlotBytes / sizeof(float);

// The rotated blocks of one stripe, laid out in `z` as in the shard.
struct RotatedStripe {
    std::vector<BlockSpan> blocks;
    std::span<float> z;
    std::vector<Scale> scales;  // by block

    std::span<float> block(std::size_t b) const {
        return z.subspan(blocks[b].begin - blocks.front().begin, blocks[b].length);
    }
    bool non_finite() const;
};

// Rotates a stripe of a shard into `z`. The shard may end within its last granule.
RotatedStripe rotate_stripe(std::span<const float> shard, std::vector<BlockSpan> blocks,
                            const BlockKeys& keys, std::span<float> z);

// Codes each run into the slots that begin with its first granule; `slots` begins with the stripe's first
// granule. Returns, for each block, the head of its packets without the number of granules, and the error of
// decoding them as a share of the block's energy. Either all packets have gains or none has, because only
// packets of equal length travel in one system call.
struct CodedBlock {
    PlanesHead head;
    double noise;
};
std::vector<CodedBlock> encode_stripe(const RotatedStripe& stripe, std::span<const PacketRun> runs,
                                      const BlockKeys& keys, int planes, std::byte* slots);

}  // namespace tailcut::codec
