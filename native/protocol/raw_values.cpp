#include "protocol/raw_values.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "codec/raw.hpp"

namespace tailcut {

bool RawContributions::next(Rank shard, const GranuleSet& answered, std::uint32_t& sent, Outgoing& out) {
    const Rank peer = context_.shape.owner(shard, seq_);
    const std::uint32_t first = sent, most = context_.granules(context_.limits[peer], {});
    std::uint32_t last = std::min(layout_.granules(shard), first + most);
    if (!weights_.empty()) {  // one weight in a packet
        const float* weights = weights_.data() + layout_.begin(shard) / kGranule;
        const auto alike = [&](float weight) { return weight == weights[first]; };
        last = static_cast<std::uint32_t>(std::find_if_not(weights + first, weights + last, alike) - weights);
        out.header.scale = weights[first];
    }
    sent = last;
    if (answered.any(first, last)) return false;
    const std::uint32_t coords = layout_.coords(shard, first, last);
    out.header.first = first * kGranule;
    out.header.count = static_cast<std::uint16_t>(coords);
    put_values(layout_.begin(shard) + first * kGranule, coords, out);
    return true;
}

void RawContributions::put_values(std::uint64_t at, std::uint32_t coords, Outgoing& out) const {
    const auto values = bucket_.subspan(at, coords);
    out.header.flags = codec::has_non_finite(values) ? wire::kNonFinite : 0;
    out.payload = std::as_bytes(values);
}

RawReduction::RawReduction(const OpContext& context, Seq seq, const Layout& layout, Block memory)
    : context_(context),
      layout_(layout),
      shard_(context.shape.shard_of(context.shape.self, seq)),
      granules_(layout.granules(shard_)),
      memory_(std::move(memory)),
      mean_(memory_ ? memory_.data() + layout.shard_stride() * (layout.ranks - 1u) : nullptr) {
    sources_.reserve(layout.ranks);
    if (context.level == Level::kColumn) weights_.resize(std::size_t{layout.ranks} * granules_);
}

void RawReduction::enter(float* bucket_shard, const Coding&, std::span<const float> weights) {
    bucket_shard_ = bucket_shard;
    if (!weights_.empty()) std::copy(weights.begin(), weights.end(), weights_of(context_.shape.self));
}

float* RawReduction::slot(Rank rank) const {
    return memory_.data() + layout_.shard_stride() * (rank < context_.shape.self ? rank : rank - 1u);
}

const float* RawReduction::source(Rank rank, std::uint32_t granule) const {
    if (rank == context_.shape.self) return bucket_shard_ + granule * kGranule;
    if (rank == offer_.from && granule >= offer_.first && granule < offer_.last)
        return reinterpret_cast<const float*>(offer_.payload.data()) + (granule - offer_.first) * kGranule;
    return slot(rank) + granule * kGranule;
}

void RawReduction::offer(const wire::Header& header, std::uint32_t first, std::uint32_t last,
                         std::span<const std::byte> payload) {
    if (!weights_.empty()) std::fill_n(weights_of(header.source) + first, last - first, header.scale);
    offer_ = {header.source, first, last, payload.first(layout_.coords(shard_, first, last) * sizeof(float))};
    if (reinterpret_cast<std::uintptr_t>(payload.data()) % alignof(float) != 0) save();
}

void RawReduction::save() {
    const Offer offer = std::exchange(offer_, {});
    if (offer.first < offer.last)
        std::memcpy(slot(offer.from) + offer.first * kGranule, offer.payload.data(), offer.payload.size());
}

// The contributions to the first granules of [first, last), in rank order, and what they weigh together. `last` becomes the
// end of the run that has the same ones, with the same weights.
float RawReduction::find_sources(const std::vector<GranuleSet>& arrived, std::uint32_t first,
                                 std::uint32_t& last) {
    float weight = 0;
    sources_.clear();
    for (Rank rank = 0; rank < layout_.ranks; ++rank) {
        last = arrived[rank].run_end(first, last);
        if (!arrived[rank].test(first)) continue;
        sources_.push_back(source(rank, first));
        if (weights_.empty()) {
            weight += 1;
            continue;
        }
        const float* weights = weights_of(rank);
        weight += weights[first];
        const auto alike = [&](float other) { return other == weights[first]; };
        last = static_cast<std::uint32_t>(std::find_if_not(weights + first, weights + last, alike) - weights);
    }
    return weight;
}

bool RawReduction::settle(std::uint32_t first, std::uint32_t last, const std::vector<GranuleSet>& arrived,
                          std::vector<Run>& runs) {
    bool non_finite = false;
    for (std::uint32_t end; first < last; first = end) {
        end = last;
        if (offer_.first < offer_.last && first < offer_.first) end = std::min(end, offer_.first);
        if (first < offer_.last) end = std::min(end, offer_.last);
        const float weight = find_sources(arrived, first, end);
        const std::uint32_t coords = layout_.coords(shard_, first, end);
        const bool empty = !(weight > 0) || coords == 0;
        if (!empty)
            non_finite |= codec::mean_in_order(sources_, weight, coords, result() + first * kGranule);
        else if (bucket_shard_)
            std::fill_n(bucket_shard_ + first * kGranule, coords, 0.0f);
        energies_ += nominal_energies(coords, empty ? 0 : sources_.size(), layout_.ranks);
        runs.push_back({first, end, empty});
        if (first == offer_.first && end == offer_.last) offer_ = {};  // used up: nothing to save
    }
    return non_finite;
}

void RawReduction::sum(const std::vector<GranuleSet>& arrived, std::span<float> sums,
                       std::span<float> weights) {
    std::fill(sums.begin(), sums.end(), 0.0f);
    for (std::uint32_t first = 0, end; first < granules_; first = end) {
        end = granules_;
        const float weight = find_sources(arrived, first, end);
        const std::uint32_t coords = layout_.coords(shard_, first, end);
        const bool empty = sources_.empty() || coords == 0;
        if (!empty) codec::mean_in_order(sources_, 1, coords, sums.data() + first * kGranule);
        energies_ += nominal_energies(coords, empty ? 0 : sources_.size(), layout_.ranks);
        std::fill_n(weights.begin() + first, end - first, empty ? 0 : weight);
    }
}

void RawReduction::conclude(std::span<const float> means, const GranuleSet& held,
                            std::span<const std::uint8_t>, std::vector<Run>& runs) {
    for (std::uint32_t first = 0, end; first < granules_; first = end) {
        end = held.run_end(first, granules_);
        const std::uint32_t at = first * kGranule, coords = layout_.coords(shard_, first, end);
        const bool empty = !held.test(first) || coords == 0;
        if (!empty)
            std::copy_n(means.begin() + at, coords, result() + at);
        else if (bucket_shard_)
            std::fill_n(bucket_shard_ + at, coords, 0.0f);
        runs.push_back({first, end, empty});
    }
}

std::uint32_t RawReduction::packet(Rank peer, const Run& run, Outgoing& out) const {
    const std::uint32_t most = context_.granules(context_.limits[peer], {});
    const std::uint32_t granules = std::min(run.last - run.first, most);
    const std::uint32_t coords = layout_.coords(shard_, run.first, run.first + granules);
    out.header.count = static_cast<std::uint16_t>(coords);
    out.payload = std::as_bytes(std::span<const float>(result() + run.first * kGranule, coords));
    return granules;
}

void RawReduction::take_over(std::span<const Run> runs, float* bucket_shard) const {
    for (const Run& run : runs) {
        const std::uint32_t at = run.first * kGranule, coords = layout_.coords(shard_, run.first, run.last);
        if (run.empty)
            std::fill_n(bucket_shard + at, coords, 0.0f);
        else
            std::copy_n(mean_ + at, coords, bucket_shard + at);
    }
}

void RawReduction::leave(bool needed) {
    const float* mean = std::exchange(bucket_shard_, nullptr);
    if (mean && needed) std::copy_n(mean, layout_.length(shard_), mean_);
}

void RawReduction::compact(Block smaller) {
    std::copy_n(mean_, layout_.length(shard_), smaller.data());
    memory_ = std::move(smaller);
    mean_ = memory_.data();
}

void RawMeans::place(const wire::Header& header, std::uint32_t first, std::uint32_t last,
                     std::span<const std::byte> payload) {
    std::memcpy(base_ + layout_.begin(header.shard) + header.first, payload.data(),
                layout_.coords(header.shard, first, last) * sizeof(float));
}

void RawMeans::enter(std::span<float> bucket, const std::vector<GranuleSet>& held) {
    const float* before = std::exchange(base_, bucket.data());
    for (Rank shard = 0; memory_ && shard < layout_.ranks; ++shard)
        for (std::uint32_t g = 0, last; g < layout_.granules(shard); g = last) {
            last = held[shard].run_end(g, layout_.granules(shard));
            const std::uint64_t at = layout_.begin(shard) + g * kGranule;
            if (held[shard].test(g)) std::copy_n(before + at, layout_.coords(shard, g, last), base_ + at);
        }
    memory_ = {};
}

void RawMeans::finish(Rank own_shard, const std::vector<GranuleSet>& held) {
    for (Rank shard = 0; shard < layout_.ranks; ++shard)
        for (std::uint32_t g = 0, last; shard != own_shard && g < layout_.granules(shard); g = last) {
            last = held[shard].run_end(g, layout_.granules(shard));
            note_nominal(layout_.coords(shard, g, last), held[shard].test(g), layout_.ranks);
            if (!held[shard].test(g))
                std::fill_n(base_ + layout_.begin(shard) + g * kGranule, layout_.coords(shard, g, last),
                            0.0f);
        }
}

}  // namespace tailcut
