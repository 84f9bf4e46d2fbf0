// The order in which the packets of a shard are sent.
//
// Blocks are taken in stripes of kStripeBlocks; the last stripe also takes the short blocks at the shard's
// end. Within a stripe the blocks take turns: the first packet of each, then the second of each, and so on. A
// burst of losses then costs several blocks a part each, which the rotation spreads evenly over their
// coordinates, instead of costing one block everything.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "codec/blocks.hpp"

namespace tailcut::codec {

inline constexpr std::uint32_t kStripeBlocks = 4;
inline constexpr std::uint32_t kStripeGranules = kStripeBlocks * kBlock / kGranule;

// Granules [first, last) of a shard, all of one block.
struct PacketRun {
    std::uint32_t first, last;
    std::uint32_t block;  // index within the stripe
};

struct Stripe {
    std::vector<BlockSpan> blocks;
    std::vector<PacketRun> packets;  // in the order of sending

    std::uint32_t first_granule() const { return blocks.front().first_granule(); }
    std::uint32_t last_granule() const { return blocks.back().last_granule(); }
};

class SendOrder {
public:
    SendOrder(std::uint32_t shard_len, std::uint32_t packet_granules)
        : blocks_(shard_len), packet_granules_(packet_granules) {}

    std::uint32_t stripes() const {
        if (blocks_.padded() == 0) return 0;
        const auto whole = static_cast<std::uint32_t>(blocks_.padded() / kBlock);
        return std::max(1u, (whole + kStripeBlocks - 1) / kStripeBlocks);
    }
    std::uint32_t first_granule(std::uint32_t stripe) const {
        return stripe < stripes() ? stripe * kStripeGranules
                                  : static_cast<std::uint32_t>(blocks_.padded() / kGranule);
    }
    std::uint32_t stripe_of_granule(std::uint32_t granule) const {
        return std::min(granule / kStripeGranules, stripes() - 1);
    }
    std::uint32_t packets() const {
        if (stripes() == 0) return 0;
        std::uint32_t last = 0;
        for (const BlockSpan& block : blocks_of(stripes() - 1)) last += packets_of(block.length);
        return first_packet(stripes() - 1) + last;
    }
    std::uint32_t first_packet(std::uint32_t stripe) const {
        return stripe * kStripeBlocks * packets_of(kBlock);
    }
    std::uint32_t stripe_of_packet(std::uint32_t packet) const {
        return std::min(packet / (kStripeBlocks * packets_of(kBlock)), stripes() - 1);
    }

    Stripe stripe(std::uint32_t index) const {
        Stripe stripe{blocks_of(index), {}};
        const std::uint32_t turns = packets_of(stripe.blocks.front().length);  // of the longest block
        for (std::uint32_t turn = 0; turn < turns; ++turn)
            for (std::uint32_t b = 0; b < stripe.blocks.size(); ++b) {
                const BlockSpan& block = stripe.blocks[b];
                const std::uint32_t granules = block.length / kGranule, first = turn * packet_granules_;
                if (first >= granules) break;  // the blocks that follow are not longer
                const std::uint32_t last = std::min(first + packet_granules_, granules);
                const std::uint32_t begin = block.begin / kGranule;
                stripe.packets.push_back({begin + first, begin + last, b});
            }
        return stripe;
    }

private:
    std::uint32_t packets_of(std::uint32_t block_len) const {
        return (block_len / kGranule + packet_granules_ - 1) / packet_granules_;
    }
    std::vector<BlockSpan> blocks_of(std::uint32_t stripe) const {
        const std::uint32_t end = stripe + 1 < stripes() ? (stripe + 1) * kStripeBlocks : blocks_.count();
        std::vector<BlockSpan> spans;
        for (std::uint32_t at = stripe * kStripeBlocks * kBlock, b = stripe * kStripeBlocks; b < end; ++b) {
            spans.push_back(blocks_.of(at));
            at += spans.back().length;
        }
        return spans;
    }

    Blocks blocks_;
    std::uint32_t packet_granules_;
};

}  // namespace tailcut::codec
