#include <algorithm>
#include <utility>

#include "protocol/values/planes_values.hpp"

namespace tailcut {

PlanesMeans::PlanesMeans(const OpContext& context, const Plan& plan, Block memory)
    : shape_(context.shape), plan_(plan), memory_(std::move(memory)), base_(memory_.data()) {
    for (Rank shard = 0; shard < plan.layout.ranks; ++shard)
        blocks_.emplace_back(codec::Blocks(plan.layout.length(shard)).count());
}

// Where a block is until it has been rotated back: in place, unless it is longer than what is left of the bucket.
std::span<float> PlanesMeans::rotated(Rank shard, const codec::BlockSpan& block) {
    const auto there = result(shard, block);
    return there.size() == block.length ? there : grown(ragged_, block.length);
}

std::span<float> PlanesMeans::result(Rank shard, const codec::BlockSpan& block) const {
    return {base_ + plan_.layout.begin(shard) + block.begin,
            std::min(block.length, plan_.layout.length(shard) - block.begin)};
}

template <typename Visit>
void PlanesMeans::each_block(Rank shard, std::uint32_t first, std::uint32_t last, Visit visit) {
    const codec::Blocks blocks(plan_.layout.length(shard));
    const auto end = std::min<std::uint64_t>(blocks.padded(), std::uint64_t{last} * kGranule);
    for (std::uint64_t at = std::uint64_t{first} * kGranule; at < end;) {
        const codec::BlockSpan block = blocks.of(static_cast<std::uint32_t>(at));
        visit(block, blocks_[shard][block.index]);
        at = std::uint64_t{block.begin} + block.length;
    }
}

void PlanesMeans::place(const wire::Header& header, std::uint32_t, std::uint32_t,
                        std::span<const std::byte> payload) {
    const codec::BlockSpan block = codec::Blocks(plan_.layout.length(header.shard)).of(header.first);
    blocks_[header.shard][block.index].sum.add(
        codec::head_of(header), payload, rotated(header.shard, block).subspan(header.first - block.begin));
}

void PlanesMeans::note_answers(Rank shard, std::uint32_t first, std::uint32_t last,
                               const GranuleSet& answered, const GranuleSet& held) {
    each_block(shard, first, last, [&](const codec::BlockSpan& block, Incoming& incoming) {
        if (!incoming.done && answered.all(block.first_granule(), block.last_granule()))
            complete(shard, block, held);
    });
}

void PlanesMeans::complete(Rank shard, const codec::BlockSpan& block, const GranuleSet& held) {
    Incoming& incoming = blocks_[shard][block.index];
    const auto z = rotated(shard, block);
    const std::uint32_t begin = block.first_granule(), last = block.last_granule();
    for (std::uint32_t g = begin, end; g < last; g = end) {
        end = held.run_end(g, last);
        if (!held.test(g)) std::fill_n(z.begin() + (g - begin) * kGranule, (end - g) * kGranule, 0.0f);
    }
    const codec::BlockSum::Damage damage = incoming.sum.damage(block.length);
    energies_.received += damage.energy;
    energies_.received_trimmed += damage.trimmed;
    energies_.received_lost += damage.lost;
    (incoming.sum.weight() > 0 ? energies_.received_coords : energies_.unseen_coords) += block.length;
    const codec::BlockKeys keys(shape_.seed, plan_.seq, shard);
    incoming.sum.rotate_back_bounded(z, result(shard, block), keys.of(block));
    incoming.done = true;
}

void PlanesMeans::enter(std::span<float> bucket, const std::vector<GranuleSet>& held) {
    const float* before = std::exchange(base_, bucket.data());
    for (Rank shard = 0; memory_ && shard < plan_.layout.ranks; ++shard)
        each_block(shard, 0, plan_.layout.granules(shard),
                   [&](const codec::BlockSpan& block, Incoming& incoming) {
                       const auto to = result(shard, block);
                       const float* from = before + (to.data() - base_);
                       if (incoming.done) std::copy_n(from, to.size(), to.begin());
                       if (incoming.done || to.size() < block.length)
                           return;  // a ragged block is not in the bucket yet
                       for (std::uint32_t g = block.first_granule(), end; g < block.last_granule(); g = end) {
                           end = held[shard].run_end(g, block.last_granule());
                           const std::uint32_t at = g * kGranule - block.begin;
                           if (held[shard].test(g))
                               std::copy_n(from + at, (end - g) * kGranule, to.begin() + at);
                       }
                   });
    memory_ = {};
}

void PlanesMeans::end(Rank own_shard, const std::vector<GranuleSet>& held) {
    for (Rank shard = 0; shard < plan_.layout.ranks; ++shard)
        if (shard != own_shard)
            each_block(shard, 0, plan_.layout.granules(shard),
                       [&](const codec::BlockSpan& block, Incoming& incoming) {
                           if (!incoming.done) complete(shard, block, held[shard]);
                       });
}

}  // namespace tailcut
