#include <algorithm>
#include <cstring>
#include <utility>

#include "codec/raw.hpp"
#include "codec/rotate.hpp"
#include "protocol/values/planes_values.hpp"

namespace tailcut {
namespace {

// Zeros where nothing came.
void fill_gaps(std::span<float> z, const codec::BlockSpan& block, const GranuleSet& held) {
    const std::uint32_t begin = block.first_granule(), last = block.last_granule();
    for (std::uint32_t g = begin, end; g < last; g = end) {
        end = held.run_end(g, last);
        if (!held.test(g)) std::fill_n(z.begin() + (g - begin) * kGranule, (end - g) * kGranule, 0.0f);
    }
}

}  // namespace

PlanesMeans::PlanesMeans(const OpContext& context, const Plan& plan, Block memory)
    : context_(context), plan_(plan), memory_(std::move(memory)), base_(memory_.data()) {
    for (Rank shard = 0; shard < plan.layout.ranks; ++shard)
        blocks_.emplace_back(codec::Blocks(plan.layout.length(shard)).count());
}

// Where a block is until it is rotated back. The bucket keeps the own contribution until then.
std::span<float> PlanesMeans::rotated(Rank shard, const codec::BlockSpan& block, Incoming& incoming) {
    if (entered_) {
        if (!incoming.z)
            incoming.z =
                ended_ ? context_.memory.take_pool(block.length) : context_.memory.take(block.length);
        return incoming.z ? std::span(incoming.z.data(), block.length) : std::span<float>();
    }
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

bool PlanesMeans::place(const wire::Header& header, std::uint32_t first, std::uint32_t last,
                        std::span<const std::byte> payload) {
    const codec::BlockSpan block = codec::Blocks(plan_.layout.length(header.shard)).of(header.first);
    Incoming& incoming = blocks_[header.shard][block.index];
    const codec::PlanesHead head = codec::head_of(header);
    if (payload.size() < head.payload_bytes() && context_.carries(plan_)) {
        if (ended_) return false;  // the whole one follows
        Block copy = entered_ ? context_.memory.take((payload.size() + 3) / 4)
                              : context_.memory.take_pool((payload.size() + 3) / 4);
        if (!copy) return false;
        std::memcpy(copy.data(), payload.data(), payload.size());
        incoming.coarse.push_back({first, head, std::move(copy), payload.size(), last - first});
        return true;
    }
    const auto z = rotated(header.shard, block, incoming);
    if (z.empty()) return false;
    incoming.sum.add(head, payload, z.subspan(header.first - block.begin));
    return true;
}

bool PlanesMeans::refine(const wire::Header& header, std::uint32_t first, std::uint32_t last,
                         GranuleSet& answered) {
    const codec::BlockSpan block = codec::Blocks(plan_.layout.length(header.shard)).of(header.first);
    const bool coarse = std::erase_if(blocks_[header.shard][block.index].coarse, [&](const Coarse& piece) {
                            return piece.first == first && first + piece.head.granules == last;
                        }) > 0;
    if (coarse) answered.clear(first, last);
    return coarse;
}

// Takes in what came trimmed.
void PlanesMeans::add_coarse(const Incoming& incoming, const codec::BlockSpan& block, codec::BlockSum& sum,
                             std::span<float> z) {
    for (const Coarse& piece : incoming.coarse) {
        const auto* payload = reinterpret_cast<const std::byte*>(piece.payload.data());
        sum.add(piece.head, {payload, piece.payload_bytes},
                z.subspan((piece.first - block.first_granule()) * kGranule));
    }
}

void PlanesMeans::note_answers(Rank shard, std::uint32_t first, std::uint32_t last,
                               const GranuleSet& answered, const GranuleSet& held) {
    each_block(shard, first, last, [&](const codec::BlockSpan& block, Incoming& incoming) {
        if (incoming.done || !incoming.coarse.empty()) return;
        if (!answered.all(block.first_granule(), block.last_granule())) return;
        if (ended_)
            take_in(shard, block, held);
        else
            complete(shard, block, held);
    });
}

// What is carried completes a block later, so nothing else must make up for what is missing.
void PlanesMeans::rotate_back(Rank shard, const codec::BlockSpan& block, const codec::BlockSum& sum,
                              std::span<float> z, std::span<float> out) const {
    const codec::BlockKeys keys(context_.shape.seed, plan_.seq, shard);
    if (context_.carries(plan_))
        sum.rotate_back(z, out, keys.of(block), sum.unbiasing());
    else
        sum.rotate_back_bounded(z, out, keys.of(block));
}

void PlanesMeans::note_damage(const codec::BlockSpan& block, const codec::BlockSum& sum) {
    const codec::BlockSum::Damage damage = sum.damage(block.length);
    energies_.received += damage.energy;
    energies_.received_trimmed += damage.trimmed;
    energies_.received_lost += damage.lost;
    (sum.weight() > 0 ? energies_.received_coords : energies_.unseen_coords) += block.length;
}

void PlanesMeans::sample(std::span<const float> own, const float* mean) {
    for (std::size_t at = 0; at < own.size(); at += std::size_t{kSampledGranules} * kGranule)
        correlation_.note(own.subspan(at, std::min<std::size_t>(kGranule, own.size() - at)), mean + at);
}

void PlanesMeans::complete(Rank shard, const codec::BlockSpan& block, const GranuleSet& held) {
    Incoming& incoming = blocks_[shard][block.index];
    const auto z = rotated(shard, block, incoming);
    const auto out = result(shard, block);
    add_coarse(incoming, block, incoming.sum, z);
    incoming.coarse.clear();
    fill_gaps(z, block, held);
    note_damage(block, incoming.sum);
    if (own_) {
        const auto own = grown(context_.scratch.own, out.size());
        std::copy(out.begin(), out.end(), own.begin());
        rotate_back(shard, block, incoming.sum, z, out);
        sample(own, out.data());
    } else {
        rotate_back(shard, block, incoming.sum, z, out);
    }
    incoming.z = {};
    incoming.done = true;
}

void PlanesMeans::enter(std::span<float> bucket, const std::vector<GranuleSet>&, bool own) {
    own_ = own && context_.carries(plan_);
    const float* before = std::exchange(base_, bucket.data());
    for (Rank shard = 0; memory_ && shard < plan_.layout.ranks; ++shard)
        each_block(shard, 0, plan_.layout.granules(shard),
                   [&](const codec::BlockSpan& block, Incoming& incoming) {
                       const auto to = result(shard, block);
                       const float* from = before + (to.data() - base_);
                       if (incoming.done) {
                           if (own_) sample(to, from);
                           std::copy_n(from, to.size(), to.begin());
                       } else if (incoming.sum.weight() > 0) {
                           incoming.z = context_.memory.take(block.length);
                           if (to.size() < block.length) from = ragged_.data();
                           std::copy_n(from, block.length, incoming.z.data());
                       }
                   });
    entered_ = true;
    memory_ = {};
}

void PlanesMeans::end(const StandIn& stand_in, std::vector<GranuleSet>& answered,
                      const std::vector<GranuleSet>& held) {
    for (Rank shard = 0; shard < plan_.layout.ranks; ++shard) {
        if (shard == plan_.own_shard()) continue;
        each_block(
            shard, 0, plan_.layout.granules(shard), [&](const codec::BlockSpan& block, Incoming& incoming) {
                if (incoming.done) return;
                if (stand_in.carried && complete_late(shard, block, stand_in, answered[shard], held[shard]))
                    return;
                complete(shard, block, held[shard]);
                if (stand_in.carried) answered[shard].set(block.first_granule(), block.last_granule());
            });
    }
    ended_ = true;
}

// ---- what is late -----------------------------------------------------------------------------------------

// Fills in what has not come of a block with a share of the own gradient, among the rotated coordinates, and keeps what it
// takes to find the exact difference later. Returns false if there is no memory for that.
bool PlanesMeans::complete_late(Rank shard, const codec::BlockSpan& block, const StandIn& stand_in,
                                const GranuleSet& answered, const GranuleSet& held) {
    Incoming& incoming = blocks_[shard][block.index];
    const auto out = result(shard, block);
    Block late = context_.memory.take_pool(out.size());
    if (!late || !incoming.z.join_pool()) return false;
    const float share = codec::has_non_finite(out) ? 0 : stand_in.shares[shard];
    codec::BlockSum sum = incoming.sum;
    const auto came = grown(context_.scratch.late, block.length);
    if (incoming.z) std::copy_n(incoming.z.data(), block.length, came.begin());
    add_coarse(incoming, block, sum, came);
    if (sum.weight() > 0) {
        const codec::BlockKeys keys(context_.shape.seed, plan_.seq, shard);
        const auto z = grown(context_.scratch.own, block.length);
        std::fill(std::copy(out.begin(), out.end(), z.begin()), z.end(), 0.0f);
        if (share > 0) codec::rotate(z, z, keys.of(block));
        if (codec::has_non_finite(z))
            std::fill(z.begin(), z.end(), 0.0f);  // too large to be rotated as it is
        const float filled = share * sum.shift() / static_cast<float>(sum.unbiasing());
        const std::uint32_t begin = block.first_granule();
        for (std::uint32_t g = begin; g < block.last_granule(); ++g) {
            const std::uint32_t at = (g - begin) * kGranule;
            for (std::uint32_t k = at; k < at + kGranule; ++k)
                z[k] = held.test(g) ? came[k] : answered.test(g) ? 0 : z[k] * filled;
        }
        rotate_back(shard, block, sum, z, out);
    } else {
        for (float& value : out) value = share > 0 ? share * value : 0;
    }
    note_damage(block, sum);
    std::copy(out.begin(), out.end(), late.data());
    incoming.late = std::move(late);
    return true;
}

void PlanesMeans::reopen(std::vector<GranuleSet>& answered) {
    each_late([&](Rank shard, const codec::BlockSpan&, Incoming& incoming) {
        for (const Coarse& piece : std::exchange(incoming.coarse, {}))
            answered[shard].clear(piece.first, piece.first + piece.granules);
    });
}

// All of a block has come after the end.
void PlanesMeans::take_in(Rank shard, const codec::BlockSpan& block, const GranuleSet& held) {
    Incoming& incoming = blocks_[shard][block.index];
    const auto late = std::span(incoming.late.data(), result(shard, block).size());
    const auto mean = grown(context_.scratch.own, block.length);
    if (incoming.z && incoming.sum.weight() > 0) {
        const auto z = std::span(incoming.z.data(), block.length);
        fill_gaps(z, block, held);
        rotate_back(shard, block, incoming.sum, z, mean);
    } else {
        std::fill(mean.begin(), mean.end(), 0.0f);
    }
    // Others have skipped an op with an Inf or a NaN, so that nothing of it is left to be added.
    if (codec::has_non_finite(mean)) std::fill(mean.begin(), mean.end(), 0.0f);
    for (std::size_t k = 0; k < late.size(); ++k) late[k] = mean[k] - late[k];
    incoming.z = {};
    incoming.done = true;
    incoming.due = !incoming.forgotten;
}

template <typename Visit>
void PlanesMeans::each_late(Visit visit) {
    for (Rank shard = 0; shard < plan_.layout.ranks; ++shard)
        each_block(shard, 0, plan_.layout.granules(shard),
                   [&](const codec::BlockSpan& block, Incoming& incoming) {
                       if (incoming.late) visit(shard, block, incoming);
                   });
}

bool PlanesMeans::due() const {
    return std::any_of(blocks_.begin(), blocks_.end(), [](const std::vector<Incoming>& blocks) {
        return std::any_of(blocks.begin(), blocks.end(), [](const Incoming& block) { return block.due; });
    });
}

void PlanesMeans::each_due(const DueVisit& visit) const {
    for (Rank shard = 0; shard < plan_.layout.ranks; ++shard) {
        const codec::Blocks blocks(plan_.layout.length(shard));
        for (std::uint32_t at = 0; at < blocks.padded();) {
            const codec::BlockSpan block = blocks.of(at);
            if (blocks_[shard][block.index].due) visit(shard, block.first_granule(), block.last_granule());
            at = block.begin + block.length;
        }
    }
}

std::uint64_t PlanesMeans::add_late(std::span<float> bucket, float factor) {
    std::uint64_t coords = 0;
    each_late([&](Rank shard, const codec::BlockSpan& block, Incoming& incoming) {
        if (!incoming.due) return;
        const std::size_t length = std::min(block.length, plan_.layout.length(shard) - block.begin);
        float* to = bucket.data() + plan_.layout.begin(shard) + block.begin;
        for (std::size_t k = 0; k < length; ++k) to[k] += incoming.late.data()[k] * factor;
        incoming.due = false, incoming.added = true;
        coords += length;
    });
    return coords;
}

void PlanesMeans::give_back() {
    each_late([](Rank, const codec::BlockSpan&, Incoming& incoming) {
        incoming.due |= std::exchange(incoming.added, false);
    });
}

void PlanesMeans::settle() {
    each_late([](Rank, const codec::BlockSpan&, Incoming& incoming) {
        if (std::exchange(incoming.added, false)) incoming.late = {};
    });
}

void PlanesMeans::forget(std::uint64_t first, std::uint64_t last) {
    each_late([&](Rank shard, const codec::BlockSpan& block, Incoming& incoming) {
        const std::uint64_t begin = plan_.layout.begin(shard) + block.begin;
        if (begin < first || begin >= last) return;
        incoming.forgotten = true;
        incoming.due = incoming.added = false;
    });
}

}  // namespace tailcut
