#include <algorithm>
#include <cmath>
#include <vector>

#include "protocol/values/planes_values.hpp"

namespace tailcut {

// Packets on their way out keep it alive as well.
struct PlanesContributions::EncodedStripe {
    std::uint32_t first_step = 0;
    codec::Stripe stripe;
    std::vector<codec::PlanesHead> heads;  // by block
    Block slots;
};

PlanesContributions::PlanesContributions(const OpContext& context, const Plan& plan, const Coding& coding,
                                         std::span<const float> bucket)
    : context_(context), plan_(plan), coding_(coding), bucket_(bucket) {
    for (Rank shard = 0; shard < plan.layout.ranks; ++shard) {
        const codec::PacketLimits& limits = context.limits[plan.owner(shard)];
        const codec::SendOrder order(plan.layout.length(shard), context.granules(limits, coding));
        Share share{order, std::max(1u, order.packets()), {}, {}};
        share.encoded.resize(order.stripes());
        for (std::uint32_t k = 0; k < order.stripes(); ++k)
            share.undelivered.push_back(
                (k + 1 < order.stripes() ? order.first_packet(k + 1) : order.packets()) -
                order.first_packet(k));
        shards_.push_back(std::move(share));
    }
}

bool PlanesContributions::next(Rank shard, const GranuleSet& answered, std::uint32_t& sent, Outgoing& out) {
    const std::uint32_t step = sent++;
    const codec::SendOrder& order = shards_[shard].order;
    const std::uint32_t index = order.stripe_of_packet(step);
    if (answered.all(order.first_granule(index), order.first_granule(index + 1))) return false;
    if (bucket_.empty() && !shards_[shard].encoded[index]) return false;
    const auto& keeper = encoded(shard, index);
    const codec::PacketRun& run = keeper->stripe.packets[step - keeper->first_step];
    const codec::BlockSpan& block = keeper->stripe.blocks[run.block];
    if (answered.any(block.first_granule(), block.last_granule())) return false;

    codec::PlanesHead head = keeper->heads[run.block];
    head.granules = run.last - run.first;
    codec::put_run(head, run.first, plan_.layout.length(shard), out.header);
    out.header.flags = std::isnan(head.sigma) ? wire::kNonFinite : 0;
    const std::size_t at = std::size_t{run.first - keeper->stripe.first_granule()} * codec::kSlotBytes;
    out.payload = {reinterpret_cast<const std::byte*>(keeper->slots.data()) + at, head.payload_bytes()};
    out.keeper = keeper;
    return true;
}

const std::shared_ptr<PlanesContributions::EncodedStripe>& PlanesContributions::encoded(Rank shard,
                                                                                        std::uint32_t index) {
    auto& stripe = shards_[shard].encoded[index];
    if (!stripe) stripe = encode(shard, index);
    return stripe;
}

std::shared_ptr<PlanesContributions::EncodedStripe> PlanesContributions::encode(Rank shard,
                                                                                std::uint32_t index) {
    auto encoded = std::make_shared<EncodedStripe>();
    encoded->first_step = shards_[shard].order.first_packet(index);
    encoded->stripe = shards_[shard].order.stripe(index);
    const std::uint32_t first = encoded->stripe.first_granule(), last = encoded->stripe.last_granule();
    const codec::BlockKeys keys(context_.shape.seed, plan_.seq, shard);
    const auto rotated = codec::rotate_stripe(
        bucket_.subspan(plan_.layout.begin(shard), plan_.layout.length(shard)), encoded->stripe.blocks, keys,
        grown(context_.scratch.stripe, std::size_t{last - first} * kGranule));
    encoded->slots = context_.memory.take((last - first) * codec::kSlotFloats);
    for (const codec::CodedBlock& coded :
         codec::encode_stripe(rotated, encoded->stripe.packets, keys, coding_.planes,
                              reinterpret_cast<std::byte*>(encoded->slots.data()))) {
        const double energy = coded.head.sigma > 0 ? double{coded.head.sigma} * coded.head.sigma : 0;
        const double length = encoded->stripe.blocks[encoded->heads.size()].length;
        energies_.sent_noise += length * energy * coded.noise;
        energies_.sent_nominal += length * energy * codec::nominal_noise(coding_.planes);
        encoded->heads.push_back(coded.head);
    }
    if (!residue.empty() && coding_.planes <= kCarriedPlanes) note_residue(shard, *encoded);
    return encoded;
}

// What owners do not get of the stripe: its values less what its packets decode to when all of them come whole.
void PlanesContributions::note_residue(Rank shard, const EncodedStripe& encoded) {
    const codec::Stripe& stripe = encoded.stripe;
    const codec::BlockKeys keys(context_.shape.seed, plan_.seq, shard);
    const std::uint32_t first = stripe.first_granule();
    const auto z = grown(context_.scratch.stripe, std::size_t{stripe.last_granule() - first} * kGranule);
    std::vector<codec::BlockSum> sums(stripe.blocks.size());
    for (const codec::PacketRun& packet : stripe.packets) {
        codec::PlanesHead head = encoded.heads[packet.block];
        head.granules = packet.last - packet.first;
        const std::size_t granule = packet.first - first;
        const auto* payload =
            reinterpret_cast<const std::byte*>(encoded.slots.data()) + granule * codec::kSlotBytes;
        sums[packet.block].add(head, {payload, head.payload_bytes()}, z.subspan(granule * kGranule));
    }
    for (std::size_t b = 0; b < stripe.blocks.size(); ++b) {
        if (std::isnan(encoded.heads[b].sigma)) continue;  // nobody applies it
        const codec::BlockSpan& block = stripe.blocks[b];
        const auto decoded = z.subspan(block.begin - stripe.blocks.front().begin, block.length);
        sums[b].rotate_back(decoded, decoded, keys.of(block), sums[b].unbiasing());
        const std::size_t begin = plan_.layout.begin(shard) + block.begin;
        const std::size_t length = std::min(block.length, plan_.layout.length(shard) - block.begin);
        for (std::size_t k = 0; k < length; ++k) residue[begin + k] = bucket_[begin + k] - decoded[k];
    }
}

void PlanesContributions::note_delivered(Rank shard, std::uint32_t step) {
    Share& share = shards_[shard];
    const std::uint32_t index = share.order.stripe_of_packet(step);
    if (share.undelivered[index] > 0 && --share.undelivered[index] == 0) share.encoded[index].reset();
}

void PlanesContributions::keep(Rank shard, std::uint32_t first, std::uint32_t last) {
    const Share& share = shards_[shard];
    if (share.order.stripes() == 0) return;
    for (std::uint32_t k = share.order.stripe_of_granule(first); k <= share.order.stripe_of_granule(last - 1);
         ++k)
        if (share.undelivered[k] > 0) encoded(shard, k);
}

bool PlanesContributions::keep_rest() {
    // First all of it, so that the residue does not depend on room.
    for (Rank shard = 0; shard < plan_.layout.ranks; ++shard)
        if (shard != plan_.own_shard() && plan_.layout.length(shard) > 0)
            keep(shard, 0, plan_.layout.granules(shard));
    bucket_ = {};
    for (const Share& share : shards_)
        for (const auto& stripe : share.encoded)
            if (stripe && !stripe->slots.join_pool()) return false;
    return true;
}

}  // namespace tailcut
