#include "codec/stripe.hpp"

#include <algorithm>

namespace tailcut::codec {

bool RotatedStripe::non_finite() const {
    return std::any_of(scales.begin(), scales.end(), [](const Scale& scale) { return scale.non_finite; });
}

RotatedStripe rotate_stripe(std::span<const float> shard, std::vector<BlockSpan> blocks,
                            const BlockKeys& keys, std::span<float> z) {
    RotatedStripe stripe{std::move(blocks), z, {}};
    for (std::size_t b = 0; b < stripe.blocks.size(); ++b) {
        const BlockSpan& block = stripe.blocks[b];
        const auto to = stripe.block(b);
        const auto from =
            shard.subspan(block.begin, std::min<std::size_t>(block.length, shard.size() - block.begin));
        if (from.size() == to.size()) {
            stripe.scales.push_back(rotate_and_scale(from, to, keys.of(block)));
        } else {
            std::fill(std::copy(from.begin(), from.end(), to.begin()), to.end(), 0.0f);
            stripe.scales.push_back(rotate_and_scale(to, to, keys.of(block)));
        }
    }
    return stripe;
}

std::vector<CodedBlock> encode_stripe(const RotatedStripe& stripe, std::span<const PacketRun> runs,
                                      const BlockKeys& keys, int planes, std::byte* slots) {
    Gains nominal;
    if (std::any_of(stripe.scales.begin(), stripe.scales.end(),
                    [](const Scale& scale) { return scale.far_from_gaussian(); }))
        nominal.deviation[1] = kNominalGain;
    std::vector<Gains> gains;
    std::vector<CodedBlock> coded;
    for (std::size_t b = 0; b < stripe.blocks.size(); ++b) {
        const Scale& scale = stripe.scales[b];
        gains.push_back(scale.far_from_gaussian()
                            ? measure_gains(stripe.block(b), scale, keys.of(stripe.blocks[b]), planes)
                            : nominal);
        coded.push_back({head_of(0, planes, scale, gains.back()), gains.back().noise_at(planes)});
    }
    const std::uint32_t origin = stripe.blocks.front().begin / kGranule;
    for (const PacketRun& run : runs) {
        const BlockSpan& block = stripe.blocks[run.block];
        const std::uint32_t in_block = run.first - block.begin / kGranule;
        PlanesHead head = coded[run.block].head;
        head.granules = run.last - run.first;
        const std::size_t at = std::size_t{run.first - origin} * kSlotBytes;
        encode(stripe.block(run.block).subspan(in_block * kGranule, head.granules * kGranule), head,
               stripe.scales[run.block], gains[run.block], keys.of(block), in_block,
               {slots + at, head.payload_bytes()});
    }
    return coded;
}

}  // namespace tailcut::codec
