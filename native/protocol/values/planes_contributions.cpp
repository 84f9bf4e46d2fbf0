#include <algorithm>
#include <cmath>

#include "protocol/values/planes_values.hpp"

namespace tailcut {

// Packets on their way out keep it alive, so that the next one can be encoded before they are sent.
struct PlanesContributions::EncodedStripe {
    std::uint32_t index = 0, first_step = 0;
    codec::Stripe stripe;
    std::vector<codec::PlanesHead> heads;  // by block
    Block slots;
};

PlanesContributions::PlanesContributions(const OpContext& context, const Plan& plan, const Coding& coding,
                                         std::span<const float> bucket)
    : context_(context), plan_(plan), coding_(coding), bucket_(bucket), encoded_(plan.layout.ranks) {
    for (Rank shard = 0; shard < plan.layout.ranks; ++shard) {
        const codec::PacketLimits& limits = context.limits[plan.owner(shard)];
        orders_.emplace_back(plan.layout.length(shard), context.granules(limits, coding));
        steps_.push_back(std::max(1u, orders_.back().packets()));
    }
}

bool PlanesContributions::next(Rank shard, const GranuleSet& answered, std::uint32_t& sent, Outgoing& out) {
    const std::uint32_t index = orders_[shard].stripe_of_packet(sent);
    auto& encoded = encoded_[shard];
    if (!encoded || encoded->index != index) encoded = encode(shard, index, answered);
    const codec::PacketRun& run = encoded->stripe.packets[sent - encoded->first_step];
    const codec::BlockSpan& block = encoded->stripe.blocks[run.block];
    const auto keeper = encoded;
    if (++sent == steps_[shard]) encoded.reset();
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

std::shared_ptr<const PlanesContributions::EncodedStripe> PlanesContributions::encode(
    Rank shard, std::uint32_t index, const GranuleSet& answered) {
    auto encoded = std::make_shared<EncodedStripe>();
    encoded->index = index;
    encoded->first_step = orders_[shard].first_packet(index);
    encoded->stripe = orders_[shard].stripe(index);
    const std::uint32_t first = encoded->stripe.first_granule(), last = encoded->stripe.last_granule();
    if (answered.all(first, last)) return encoded;
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
    return encoded;
}

void PlanesContributions::retract(const Outgoing& out) {
    encoded_[out.header.shard] = std::static_pointer_cast<const EncodedStripe>(out.keeper);
}

std::uint32_t PlanesContributions::first_unseen(Rank shard, std::uint32_t sent) const {
    const codec::SendOrder& order = orders_[shard];
    return sent < steps_[shard] ? order.first_granule(order.stripe_of_packet(sent))
                                : plan_.layout.granules(shard);
}

}  // namespace tailcut
