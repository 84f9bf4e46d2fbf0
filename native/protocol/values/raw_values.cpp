#include "protocol/values/raw_values.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace tailcut {

bool RawContributions::next(Rank shard, const GranuleSet& answered, std::uint32_t& sent, Outgoing& out) {
    const std::uint32_t first = sent;
    sent = packet_end(shard, first);
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
    put_values(plan_.layout.begin(shard) + first * kGranule, coords, out);
    return true;
}

void RawContributions::put_values(std::uint64_t at, std::uint32_t coords, Outgoing& out) const {
    const auto values = bucket_.subspan(at, coords);
    out.header.flags = codec::has_non_finite(values) ? wire::kNonFinite : 0;
    out.payload = std::as_bytes(values);
}

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
    const std::uint32_t coords = plan_.layout.coords(shard_, first, last);
    if (bucket_shard_) std::fill_n(bucket_shard_ + first * kGranule, coords, 0.0f);
    runs.push_back({first, last, true});
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

void RawMeans::place(const wire::Header& header, std::uint32_t first, std::uint32_t last,
                     std::span<const std::byte> payload) {
    std::memcpy(base_ + plan_.layout.begin(header.shard) + header.first, payload.data(),
                plan_.layout.coords(header.shard, first, last) * sizeof(float));
}

void RawMeans::enter(std::span<float> bucket, const std::vector<GranuleSet>& held) {
    const float* before = std::exchange(base_, bucket.data());
    for (Rank shard = 0; memory_ && shard < plan_.layout.ranks; ++shard)
        for (std::uint32_t g = 0, last; g < plan_.layout.granules(shard); g = last) {
            last = held[shard].run_end(g, plan_.layout.granules(shard));
            const std::uint64_t at = plan_.layout.begin(shard) + g * kGranule;
            if (held[shard].test(g))
                std::copy_n(before + at, plan_.layout.coords(shard, g, last), base_ + at);
        }
    memory_ = {};
}

void RawMeans::end(Rank own_shard, const std::vector<GranuleSet>& held) {
    for (Rank shard = 0; shard < plan_.layout.ranks; ++shard)
        for (std::uint32_t g = 0, last; shard != own_shard && g < plan_.layout.granules(shard); g = last) {
            last = held[shard].run_end(g, plan_.layout.granules(shard));
            note_nominal(plan_.layout.coords(shard, g, last), held[shard].test(g), plan_.layout.ranks);
            if (!held[shard].test(g))
                std::fill_n(base_ + plan_.layout.begin(shard) + g * kGranule,
                            plan_.layout.coords(shard, g, last), 0.0f);
        }
}

}  // namespace tailcut
