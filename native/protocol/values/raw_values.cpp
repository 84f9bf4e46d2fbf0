#include "protocol/values/raw_values.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

namespace tailcut {

bool RawContributions::next(Rank shard, const GranuleSet& answered, std::uint32_t& sent, Outgoing& out) {
    const std::uint32_t first = sent;
    sent = packet_end(shard, first);
    if (bucket_.empty() && !(shards_[shard].kept.test(first) && shards_[shard].values)) return false;
    return put_run(shard, first, sent, answered, out);
}

std::uint32_t RawContributions::packet_end(Rank shard, std::uint32_t first) const {
    const codec::PacketLimits& limits = context_.limits[plan_.owner(shard)];
    return std::min(plan_.layout.granules(shard), first + context_.granules(limits, {}));
}

bool RawContributions::put_run(Rank shard, std::uint32_t first, std::uint32_t last,
                               const GranuleSet& answered, Outgoing& out) const {
    if (answered.any(first, last)) return false;
    const std::uint32_t coords = plan_.layout.coords(shard, first, last);
    out.header.first = first * kGranule;
    out.header.count = static_cast<std::uint16_t>(coords);
    put_values(shard, first, coords, out);
    return true;
}

void RawContributions::put_values(Rank shard, std::uint32_t first, std::uint32_t coords,
                                  Outgoing& out) const {
    const Share& share = shards_[shard];
    const auto values = share.kept.test(first)
                            ? std::span<const float>(share.values.data() + first * kGranule, coords)
                            : bucket_.subspan(plan_.layout.begin(shard) + first * kGranule, coords);
    out.header.flags = codec::has_non_finite(values) ? wire::kNonFinite : 0;
    out.payload = std::as_bytes(values);
}

void RawContributions::note_delivered(Rank shard, std::uint32_t step) {
    shards_[shard].delivered.set(step, packet_end(shard, step));
}

void RawContributions::keep(Rank shard, std::uint32_t first, std::uint32_t last) {
    Share& share = shards_[shard];
    if (share.delivered.all(first, last)) return;
    const std::uint32_t stride = packet_end(shard, 0);
    for (first -= first % stride; first < last; first += stride) {
        const std::uint32_t end = packet_end(shard, first);
        if (share.delivered.test(first) || share.kept.test(first)) continue;
        if (!share.values) share.values = context_.memory.take(std::size_t{steps(shard)} * kGranule);
        if (!context_.elided)
            std::copy_n(bucket_.data() + plan_.layout.begin(shard) + first * kGranule,
                        plan_.layout.coords(shard, first, end), share.values.data() + first * kGranule);
        share.kept.set(first, end);
    }
}

bool RawContributions::keep_rest() {
    for (Rank shard = 0; shard < plan_.layout.ranks; ++shard) {
        if (shard == plan_.own_shard()) continue;
        keep(shard, 0, steps(shard));
        if (shards_[shard].delivered.all(0, steps(shard))) shards_[shard].values = {};
        if (!shards_[shard].values.join_pool()) return false;
    }
    bucket_ = {};
    return true;
}

// ---- the mean ---------------------------------------------------------------------------------------------

RawReduction::RawReduction(const OpContext& context, const Plan& plan, const Coding&, Block memory)
    : context_(context),
      plan_(plan),
      shard_(plan.own_shard()),
      granules_(plan.layout.granules(shard_)),
      memory_(std::move(memory)),
      mean_(memory_ ? memory_.data() + plan.layout.shard_stride() * (plan.layout.ranks - 1u) : nullptr) {
    sources_.reserve(plan.layout.ranks);
}

float* RawReduction::slot(Rank rank) const {
    return memory_.data() + plan_.layout.shard_stride() * (rank < context_.shape.self ? rank : rank - 1u);
}

const float* RawReduction::source(Rank rank, std::uint32_t granule) const {
    if (rank == context_.shape.self) return bucket_shard_ + granule * kGranule;
    if (rank == offer_.from && granule >= offer_.first && granule < offer_.last)
        return reinterpret_cast<const float*>(offer_.payload.data()) + (granule - offer_.first) * kGranule;
    return slot(rank) + granule * kGranule;
}

void RawReduction::offer(const wire::Header& header, std::uint32_t first, std::uint32_t last,
                         std::span<const std::byte> payload) {
    offer_ = {header.source, first, last,
              payload.first(plan_.layout.coords(shard_, first, last) * sizeof(float))};
    if (reinterpret_cast<std::uintptr_t>(payload.data()) % alignof(float) != 0) save();
}

void RawReduction::save() {
    const Offer offer = std::exchange(offer_, {});
    if (offer.first < offer.last)
        std::memcpy(slot(offer.from) + offer.first * kGranule, offer.payload.data(), offer.payload.size());
}

float RawReduction::find_sources(const std::vector<GranuleSet>& arrived, std::uint32_t first,
                                 std::uint32_t& last) {
    sources_.clear();
    for (Rank rank = 0; rank < plan_.layout.ranks; ++rank) {
        last = arrived[rank].run_end(first, last);
        if (arrived[rank].test(first)) sources_.push_back(source(rank, first));
    }
    return static_cast<float>(sources_.size());
}

bool RawReduction::reduce(std::uint32_t first, std::uint32_t last, const std::vector<GranuleSet>& arrived,
                          std::vector<Run>& runs) {
    return reduce_runs(first, last, arrived, runs,
                       [&](const auto& came, std::uint32_t from, std::uint32_t& until) {
                           return find_sources(came, from, until);
                       });
}

void RawReduction::put_empty(std::uint32_t first, std::uint32_t last, std::vector<Run>& runs) {
    for (std::uint32_t end; first < last; first = end) {
        const bool some = carried(first, first + 1);
        for (end = first + 1; end < last && carried(end, end + 1) == some;) ++end;
        if (result()) std::fill_n(result() + first * kGranule, plan_.layout.coords(shard_, first, end), 0.0f);
        if (some) add_carried(first, end);
        runs.push_back({first, end, !some});
    }
}

void RawReduction::await(std::uint32_t first, std::uint32_t last, const std::vector<GranuleSet>& arrived,
                         bool empty) {
    if (!abstains_ || !memory_ || !context_.carries(plan_)) return;
    const std::span<const float> mean(result() + first * kGranule, plan_.layout.coords(shard_, first, last));
    context_.carry.await(context_, plan_, loss_scale_tag, first, last, arrived, *abstains_,
                         empty ? std::span<const float>() : mean);
}

void RawReduction::add_carried(std::uint32_t first, std::uint32_t last) {
    const auto sum = grown(context_.scratch.carried, plan_.layout.coords(shard_, first, last));
    std::fill(sum.begin(), sum.end(), 0.0f);
    context_.carry.add_to(plan_, loss_scale_tag, first, last, sum);
    float* mean = result() + first * kGranule;
    const auto members = static_cast<float>(plan_.members());
    for (std::size_t k = 0; k < sum.size(); ++k) mean[k] += sum[k] / members;
}

void RawReduction::hand_on(const std::vector<GranuleSet>& arrived, const GranuleSet& final) {
    LateShard* late = context_.carry.late_shard(plan_);
    for (Rank rank = 0; late && rank < plan_.layout.ranks; ++rank) {
        if (rank == context_.shape.self) continue;
        GranuleSet open = arrived[rank];
        open.remove(final);
        open.each_run(0, granules_, [&](std::uint32_t first, std::uint32_t last) {
            float* values = slot(rank) + first * kGranule;
            const std::uint32_t coords = plan_.layout.coords(shard_, first, last);
            std::fill(values + coords, values + (last - first) * kGranule, 0.0f);
            if (!codec::has_non_finite({values, coords})) late->put(rank, first, last, values);
        });
    }
    if (late && bucket_shard_ && !late->put_own({bucket_shard_, plan_.layout.length(shard_)}))
        context_.carry.note_eviction();
}

std::uint32_t RawReduction::packet(Destination to, const Run& run, Outgoing& out) const {
    const std::uint32_t most = context_.granules(context_.limits_to(to), {});
    const std::uint32_t granules = std::min(run.last - run.first, most);
    const std::uint32_t coords = plan_.layout.coords(shard_, run.first, run.first + granules);
    out.header.count = static_cast<std::uint16_t>(coords);
    out.payload = std::as_bytes(std::span<const float>(result() + run.first * kGranule, coords));
    return granules;
}

void RawReduction::take_over(std::span<const Run> runs, float* bucket_shard) const {
    for (const Run& run : runs) {
        const std::uint32_t at = run.first * kGranule,
                            coords = plan_.layout.coords(shard_, run.first, run.last);
        if (run.empty)
            std::fill_n(bucket_shard + at, coords, 0.0f);
        else
            std::copy_n(mean_ + at, coords, bucket_shard + at);
    }
}

void RawReduction::hand_back(bool needed) {
    const float* mean = std::exchange(bucket_shard_, nullptr);
    if (mean && needed) std::copy_n(mean, plan_.layout.length(shard_), mean_);
}

void RawReduction::compact(Block smaller) {
    std::copy_n(mean_, plan_.layout.length(shard_), smaller.data());
    memory_ = std::move(smaller);
    mean_ = memory_.data();
}

// ---- means ------------------------------------------------------------------------------------------------

bool RawMeans::place(const wire::Header& header, std::uint32_t first, std::uint32_t last,
                     std::span<const std::byte> payload) {
    const std::uint32_t coords = plan_.layout.coords(header.shard, first, last);
    const std::byte* values = payload.data() + (first * kGranule - header.first) * sizeof(float);
    if (late_.empty()) {
        if (own_) sample(header.shard, first, last, values);
        std::memcpy(base_ + plan_.layout.begin(header.shard) + first * kGranule, values,
                    coords * sizeof(float));
        return true;
    }
    const auto mean = grown(context_.scratch.own, coords);
    std::memcpy(mean.data(), values, coords * sizeof(float));
    // Others have skipped an op with an Inf or a NaN, so that nothing of it is left to be added.
    if (codec::has_non_finite(mean)) std::fill(mean.begin(), mean.end(), 0.0f);
    float* value = late_[header.shard].values.data() + first * kGranule;
    for (std::uint32_t k = 0; k < coords; ++k) value[k] = mean[k] - value[k];
    return true;
}

// The own contribution is still there, and is about to be overwritten.
void RawMeans::sample(Rank shard, std::uint32_t first, std::uint32_t last, const std::byte* mean) {
    const std::uint32_t sampled = (first + kSampledGranules - 1) / kSampledGranules * kSampledGranules;
    for (std::uint32_t g = sampled; g < last; g += kSampledGranules) {
        const std::span<const float> own(base_ + plan_.layout.begin(shard) + g * kGranule,
                                         plan_.layout.coords(shard, g, g + 1));
        std::array<float, kGranule> values;  // a payload may lie anywhere
        std::memcpy(values.data(), mean + (g - first) * kGranule * sizeof(float), own.size_bytes());
        correlation_.note(own, values.data());
    }
}

void RawMeans::note_answers(Rank shard, std::uint32_t first, std::uint32_t last, const GranuleSet&,
                            const GranuleSet& held) {
    if (late_.empty()) return;
    Late& late = late_[shard];
    late.due.set(first, last);
    late.due.remove(late.forgotten);
    if (held.test(first)) return;  // a packet has values, or is EMPTY, as a whole
    for (float& value : std::span(late.values.data() + first * kGranule, (last - first) * kGranule))
        value = -value;
}

void RawMeans::enter(std::span<float> bucket, const std::vector<GranuleSet>& held, bool own) {
    own_ = own && context_.carries(plan_);
    const float* before = std::exchange(base_, bucket.data());
    for (Rank shard = 0; memory_ && shard < plan_.layout.ranks; ++shard)
        held[shard].each_run(0, plan_.layout.granules(shard), [&](std::uint32_t first, std::uint32_t last) {
            const std::uint64_t at = plan_.layout.begin(shard) + first * kGranule;
            if (own_) sample(shard, first, last, reinterpret_cast<const std::byte*>(before + at));
            std::copy_n(before + at, plan_.layout.coords(shard, first, last), base_ + at);
        });
    memory_ = {};
}

void RawMeans::end(const StandIn& stand_in, std::vector<GranuleSet>& answered,
                   const std::vector<GranuleSet>& held) {
    std::vector<Late> late(plan_.layout.ranks);
    std::swap(late_, late);
    bool any = false;
    for (Rank shard = 0; shard < plan_.layout.ranks; ++shard) {
        if (shard == plan_.own_shard()) continue;
        const std::uint32_t granules = plan_.layout.granules(shard);
        const bool lacking = !answered[shard].all(0, granules);
        const bool kept = stand_in.carried && lacking && keep(shard, stand_in.shares[shard], answered[shard]);
        any |= kept;
        for (std::uint32_t g = 0, last; g < granules; g = last) {
            last = held[shard].run_end(g, granules);
            const std::uint32_t coords = plan_.layout.coords(shard, g, last);
            note_nominal(coords, held[shard].test(g), plan_.layout.ranks);
            if (held[shard].test(g)) continue;
            float* to = base_ + plan_.layout.begin(shard) + g * kGranule;
            if (kept)
                std::copy_n(late_[shard].values.data() + g * kGranule, coords, to);
            else
                std::fill_n(to, coords, 0.0f);
        }
    }
    if (!any) late_.clear();
}

// Keeps what is filled in for the granules that have not come: a share of what the bucket holds there.
bool RawMeans::keep(Rank shard, float share, GranuleSet& answered) {
    const std::uint32_t granules = plan_.layout.granules(shard);
    Late& late = late_[shard];
    const GranuleSet none(granules);
    late = {context_.memory.take_pool(std::size_t{granules} * kGranule), none, none, none};
    if (!late.values) {
        answered.set(0, granules);
        return false;
    }
    float* values = late.values.data();
    std::fill_n(values, std::size_t{granules} * kGranule, 0.0f);
    for (std::uint32_t g = 0, last; g < granules; g = last) {
        last = answered.run_end(g, granules);
        const std::span<const float> own(base_ + plan_.layout.begin(shard) + g * kGranule,
                                         plan_.layout.coords(shard, g, last));
        if (answered.test(g) || share == 0 || codec::has_non_finite(own)) continue;
        for (std::size_t k = 0; k < own.size(); ++k) values[g * kGranule + k] = share * own[k];
    }
    return true;
}

bool RawMeans::due() const {
    return std::any_of(late_.begin(), late_.end(), [](const Late& late) { return !late.due.none(); });
}

void RawMeans::each_due(const DueVisit& visit) const {
    for (Rank shard = 0; shard < late_.size(); ++shard)
        if (late_[shard].values)
            late_[shard].due.each_run(
                0, plan_.layout.granules(shard),
                [&](std::uint32_t first, std::uint32_t last) { visit(shard, first, last); });
}

std::uint64_t RawMeans::add_late(std::span<float> bucket, float factor) {
    std::uint64_t coords = 0;
    for (Rank shard = 0; shard < late_.size(); ++shard) {
        Late& late = late_[shard];
        if (!late.values) continue;
        late.due.each_run(0, plan_.layout.granules(shard), [&](std::uint32_t first, std::uint32_t last) {
            const std::uint32_t count = plan_.layout.coords(shard, first, last);
            float* to = bucket.data() + plan_.layout.begin(shard) + first * kGranule;
            const float* from = late.values.data() + first * kGranule;
            for (std::uint32_t k = 0; k < count; ++k) to[k] += from[k] * factor;
            coords += count;
        });
        late.added |= late.due;
        late.due = GranuleSet(plan_.layout.granules(shard));
    }
    return coords;
}

void RawMeans::give_back() {
    for (Late& late : late_) late.due |= late.added;
    settle();
}

void RawMeans::settle() {
    for (Rank shard = 0; shard < late_.size(); ++shard)
        late_[shard].added = GranuleSet(plan_.layout.granules(shard));
}

void RawMeans::forget(std::uint64_t first, std::uint64_t last) {
    for (Rank shard = 0; shard < late_.size(); ++shard) {
        if (!late_[shard].values) continue;
        const std::uint64_t begin = plan_.layout.begin(shard), end = begin + plan_.layout.length(shard);
        const std::uint64_t from = std::clamp(first, begin, end), to = std::clamp(last, begin, end);
        const auto granule_of = [&](std::uint64_t coordinate) {
            return static_cast<std::uint32_t>((coordinate - begin + kGranule - 1) / kGranule);
        };
        if (from == to) continue;
        late_[shard].forgotten.set(granule_of(from), granule_of(to));
        late_[shard].due.remove(late_[shard].forgotten);
        late_[shard].added.remove(late_[shard].forgotten);
    }
}

}  // namespace tailcut
