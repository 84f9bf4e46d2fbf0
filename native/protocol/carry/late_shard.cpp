#include "protocol/carry/late_shard.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "codec/blocks.hpp"
#include "codec/planes.hpp"
#include "codec/raw.hpp"
#include "codec/rotate.hpp"
#include "protocol/carry/carry.hpp"

namespace tailcut {

LateShard::LateShard(const OpContext& context, const Plan& plan)
    : context_(context),
      plan_(plan),
      shard_(plan.own_shard()),
      granules_(plan.layout.granules(shard_)),
      late_(plan.layout.ranks),
      awaited_(plan.layout.ranks, GranuleSet(granules_)),
      due_{awaited_, awaited_} {}

bool LateShard::provide(Block& block) {
    if (!block) block = context_.memory.take_pool(std::size_t{granules_} * kGranule);
    return static_cast<bool>(block);
}

// ---- at the close -----------------------------------------------------------------------------------------

bool LateShard::await(std::uint32_t first, std::uint32_t last, const std::vector<GranuleSet>& arrived,
                      const std::vector<bool>& abstains, std::span<const float> mean) {
    if (!provide(mean_)) return false;
    for (Rank rank = 0; rank < plan_.layout.ranks; ++rank) {
        if (abstains[rank]) continue;
        for (std::uint32_t g = first, end; g < last; g = end) {
            end = arrived[rank].run_end(g, last);
            if (!arrived[rank].test(g)) awaited_[rank].set(g, end);
        }
        awaited_[rank].remove(due_.added[rank]);
    }
    if (context_.elided) return true;
    float* to = mean_.data() + std::size_t{first} * kGranule;
    std::fill(std::copy(mean.begin(), mean.end(), to), to + std::size_t{last - first} * kGranule, 0.0f);
    return true;
}

// ---- what comes later -------------------------------------------------------------------------------------

std::optional<wire::Reject> LateShard::put(const wire::Header& header, std::span<const std::byte> payload) {
    const std::uint32_t first = header.first / kGranule;
    const std::uint32_t last = first + wire::delivered_granules(header, payload.size());
    // An Inf or a NaN that its owner has not accepted decides nothing (rule 10), and must not be carried.
    if (first == last || (header.flags & wire::kNonFinite)) return wire::Reject::kLate;
    if (!awaited_[header.source].any(first, last)) return wire::Reject::kDuplicate;
    if (context_.elided)
        return put(header.source, first, last, nullptr) ? std::nullopt : std::optional(wire::Reject::kPool);
    const auto values = grown(context_.scratch.own, std::size_t{last - first} * kGranule);
    decode(header, payload, values);
    if (codec::has_non_finite(values)) return wire::Reject::kLate;
    return put(header.source, first, last, values.data()) ? std::nullopt : std::optional(wire::Reject::kPool);
}

bool LateShard::put(Rank rank, std::uint32_t first, std::uint32_t last, const float* values) {
    if (!awaited_[rank].any(first, last)) return true;
    if (!provide(late_[rank])) return false;
    awaited_[rank].each_run(first, last, [&](std::uint32_t from, std::uint32_t to) {
        due_.added[rank].set(from, to);
        if (values)
            std::copy_n(values + std::size_t{from - first} * kGranule, std::size_t{to - from} * kGranule,
                        late_[rank].data() + std::size_t{from} * kGranule);
    });
    awaited_[rank].clear(first, last);
    return true;
}

// ---- its use ----------------------------------------------------------------------------------------------

template <typename Visit>
void LateShard::each_admitted(Seq user, Rank rank, bool subtracted, std::uint32_t first, std::uint32_t last,
                              Visit visit) const {
    const GranuleSet& due = subtracted ? due_.subtracted[rank] : due_.added[rank];
    const LateAdmission* admission = context_.carry.admission();
    if (!admission) return due.each_run(first, last, visit);
    GranuleSet admitted = due;
    admission->keep_admitted(user, plan_.seq, rank, subtracted, admitted);
    admitted.each_run(first, last, visit);
}

bool LateShard::any(Seq user, std::uint32_t first, std::uint32_t last) const {
    if (!context_.carry.admission()) {
        const auto in = [&](const GranuleSet& granules) { return granules.any(first, last); };
        return std::ranges::any_of(due_.added, in) || std::ranges::any_of(due_.subtracted, in);
    }
    bool found = false;
    for (Rank rank = 0; rank < plan_.layout.ranks; ++rank)
        for (const bool subtracted : {false, true})
            each_admitted(user, rank, subtracted, first, last,
                          [&](std::uint32_t, std::uint32_t) { found = true; });
    return found;
}

std::uint64_t LateShard::add_to(std::span<float> sum, std::uint32_t first, std::uint32_t last, Seq user,
                                float factor) {
    Parts& used = used_by(user);
    const std::size_t length = std::size_t{last - first} * kGranule;
    std::span<float> values;
    if (!context_.elided) {
        values = grown(context_.scratch.late, length);
        std::fill(values.begin(), values.end(), 0.0f);
    }
    std::uint64_t coords = 0;
    for (Rank rank = 0; rank < plan_.layout.ranks; ++rank) {
        const auto use = [&](GranuleSet& due, GranuleSet& done, float sign) {
            each_admitted(user, rank, sign < 0, first, last, [&](std::uint32_t from, std::uint32_t to) {
                coords += plan_.layout.coords(shard_, from, to);
                context_.carry.note_use({user, plan_.seq, wire::Stage::kScatter, rank, sign < 0, from, to});
                done.set(from, to);
                due.clear(from, to);
                const float* late = late_[rank].data() + std::size_t{from} * kGranule;
                const float* mean = mean_.data() + std::size_t{from} * kGranule;
                const std::size_t at = std::size_t{from - first} * kGranule;
                for (std::size_t k = 0; !values.empty() && k < std::size_t{to - from} * kGranule; ++k)
                    values[at + k] += sign * (late[k] - mean[k]);
            });
        };
        use(due_.added[rank], used.added[rank], 1);
        use(due_.subtracted[rank], used.subtracted[rank], -1);
    }
    add_values(values, first, factor, sum);
    return coords;
}

LateShard::Parts& LateShard::used_by(Seq user) {
    const auto at = std::ranges::find(uses_, user, &Use::user);
    if (at != uses_.end()) return at->parts;
    const std::vector<GranuleSet> none(plan_.layout.ranks, GranuleSet(granules_));
    return uses_.emplace_back(Use{user, {none, none}}).parts;
}

void LateShard::give_back(Seq user) {
    const auto at = std::ranges::find(uses_, user, &Use::user);
    if (at == uses_.end()) return;
    // What was added is to be added again, unless it is to be subtracted.
    const auto undo = [](GranuleSet used, GranuleSet& again, GranuleSet& opposite) {
        GranuleSet both = used;
        both.keep_only(opposite);
        opposite.remove(both);
        used.remove(both);
        again |= used;
    };
    for (Rank rank = 0; rank < plan_.layout.ranks; ++rank) {
        undo(at->parts.added[rank], due_.added[rank], due_.subtracted[rank]);
        undo(at->parts.subtracted[rank], due_.subtracted[rank], due_.added[rank]);
    }
    uses_.erase(at);
}

void LateShard::revoke() {
    if (std::exchange(revoked_, true)) return;
    for (Rank rank = 0; rank < plan_.layout.ranks; ++rank) {
        awaited_[rank] = due_.added[rank] = GranuleSet(granules_);
        for (const Use& use : uses_) due_.subtracted[rank] |= use.parts.added[rank];
    }
}

void LateShard::settle(Seq user) {
    std::erase_if(uses_, [&](const Use& use) { return use.user < user; });
}

bool LateShard::done() const {
    const auto none = [](const std::vector<GranuleSet>& sets) {
        return std::all_of(sets.begin(), sets.end(), [](const GranuleSet& set) { return set.none(); });
    };
    return uses_.empty() && none(awaited_) && none(due_.added) && none(due_.subtracted);
}

std::uint64_t LateShard::unused_coords() const {
    std::uint64_t coords = 0;
    for (const GranuleSet& due : due_.added)
        due.each_run(0, granules_, [&](std::uint32_t first, std::uint32_t last) {
            coords += plan_.layout.coords(shard_, first, last);
        });
    return coords;
}

// ---- raw --------------------------------------------------------------------------------------------------

bool RawLateShard::put_own(std::span<const float> bucket_shard) {
    if (codec::has_non_finite(bucket_shard)) {
        abstain(context_.shape.self);
        return true;
    }
    const auto values = grown(context_.scratch.own, std::size_t{granules_} * kGranule);
    std::fill(std::copy(bucket_shard.begin(), bucket_shard.end(), values.begin()), values.end(), 0.0f);
    return put(context_.shape.self, 0, granules_, values.data());
}

void RawLateShard::decode(const wire::Header&, std::span<const std::byte> payload, std::span<float> values) {
    const std::size_t bytes = std::min(payload.size(), values.size_bytes());
    std::memcpy(values.data(), payload.data(), bytes);
    std::fill(values.begin() + static_cast<std::ptrdiff_t>(bytes / sizeof(float)), values.end(), 0.0f);
}

void RawLateShard::add_values(std::span<float> values, std::uint32_t, float factor, std::span<float> sum) {
    for (std::size_t k = 0; k < sum.size(); ++k) sum[k] += values[k] * factor;
}

// ---- planes -----------------------------------------------------------------------------------------------

bool PlanesLateShard::put_own(std::span<const float> bucket_shard) {
    if (codec::has_non_finite(bucket_shard)) {
        abstain(context_.shape.self);
        return true;
    }
    const codec::Blocks blocks(plan_.layout.length(shard_));
    for (std::uint64_t at = 0; at < blocks.padded();) {
        const codec::BlockSpan block = blocks.of(static_cast<std::uint32_t>(at));
        const auto values = grown(context_.scratch.own, block.length);
        const auto there = bucket_shard.subspan(
            block.begin, std::min<std::size_t>(block.length, bucket_shard.size() - block.begin));
        std::fill(std::copy(there.begin(), there.end(), values.begin()), values.end(), 0.0f);
        codec::rotate(values, values, keys_.of(block));
        if (!put(context_.shape.self, block.first_granule(), block.last_granule(), values.data()))
            return false;
        at = std::uint64_t{block.begin} + block.length;
    }
    return true;
}

void PlanesLateShard::decode(const wire::Header& header, std::span<const std::byte> payload,
                             std::span<float> values) {
    const codec::PlanesHead head = codec::head_of(header);
    std::fill(values.begin(), values.end(), 0.0f);
    std::array<float, codec::kBlock / kGranule> weights{};
    // A trimmed packet delivers its first granules only; the others have no weight.
    const auto whole = grown(context_.scratch.late, std::size_t{head.granules} * kGranule);
    std::fill(whole.begin(), whole.end(), 0.0f);
    codec::accumulate(head, payload, whole, weights);
    for (std::size_t k = 0; k < values.size(); ++k) values[k] = whole[k] / weights[k / kGranule];
}

void PlanesLateShard::add_values(std::span<float> values, std::uint32_t first, float factor,
                                 std::span<float> sum) {
    const codec::Blocks blocks(plan_.layout.length(shard_));
    for (std::size_t at = 0; at < values.size();) {
        const auto begin = static_cast<std::uint32_t>(first * kGranule + at);
        const codec::BlockSpan block = blocks.of(begin);
        const auto z = values.subspan(at, block.length);
        codec::unrotate(z, z, keys_.of(block), factor);
        for (std::size_t k = 0; k < block.length && at + k < sum.size(); ++k) sum[at + k] += z[k];
        at += block.length;
    }
}

}  // namespace tailcut
