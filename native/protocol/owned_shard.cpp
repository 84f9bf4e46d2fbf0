#include "protocol/owned_shard.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "codec/raw.hpp"

namespace tailcut {

OwnedShard::OwnedShard(const Shape& shape, const Layout& layout, Rank shard, Block memory)
    : shape_(shape),
      layout_(layout),
      shard_(shard),
      granules_(layout.granules(shard)),
      memory_(std::move(memory)),
      mean_(memory_ ? memory_.data() + layout.shard_stride() * (layout.ranks - 1u) : nullptr),
      arrived_(shape.ranks, GranuleSet(granules_)),
      settled_(granules_),
      final_(granules_),
      ended_(shape.ranks),
      abstains_(shape.ranks),
      entry_known_(shape.ranks),
      cursors_(shape.ranks) {
    sources_.reserve(shape.ranks);
}

float* OwnedShard::slot(Rank rank) const {
    return memory_.data() + layout_.shard_stride() * (rank < shape_.self ? rank : rank - 1u);
}

void OwnedShard::enter(Time now, float* bucket_shard, bool contributing) {
    memory_.leave_pool();
    if (closed()) return;
    bucket_shard_ = bucket_shard;
    note_entry(shape_.self, now);
    if (!contributing) return abstain(shape_.self, now);
    arrived_[shape_.self].set(0, granules_);
    for (auto& settled : settled_) ++settled;
    finalize_complete(0, granules_, now);
}

void OwnedShard::leave() {
    const float* mean = std::exchange(bucket_shard_, nullptr);
    if (!mean) return;
    for (Rank peer = 0; peer < shape_.ranks; ++peer)
        if (peer != shape_.self && !served(peer)) {
            std::memcpy(mean_, mean, layout_.length(shard_) * sizeof(float));
            return;
        }
}

void OwnedShard::abstain(Rank rank, Time now) {
    if (closed() || abstains_[rank]) return;
    abstains_[rank] = true;
    uneven_ |= arrived_[rank].any(0, granules_);
    for (std::uint32_t g = 0; g < granules_; ++g) settled_[g] += !arrived_[rank].test(g);
    finalize_complete(0, granules_, now);
}

void OwnedShard::end(Rank rank, Time now) {
    ended_[rank] = true;
    const bool all = std::count(ended_.begin(), ended_.end(), true) == shape_.ranks - 1;
    if (!all || closed()) return abstain(rank, now);
    for (GranuleSet& arrived : arrived_) arrived.keep_only(final_);
    close(now);
}

std::optional<wire::Reject> OwnedShard::contribute(Rank from, std::uint32_t first, std::uint32_t last,
                                                   std::span<const std::byte> payload, Time now) {
    if (closed() || abstains_[from]) return wire::Reject::kLate;
    if (arrived_[from].any(first, last)) return wire::Reject::kDuplicate;
    arrived_[from].set(first, last);
    bool complete = true;
    for (std::uint32_t g = first; g < last; ++g) complete &= ++settled_[g] == shape_.ranks;

    const bool aligned = reinterpret_cast<std::uintptr_t>(payload.data()) % alignof(float) == 0;
    if (complete && aligned && !uneven_) {
        // The last one to come is reduced straight from the receive buffer.
        finalize(first, last, from, reinterpret_cast<const float*>(payload.data()));
        if (closed()) closed_at_ = now;
        return std::nullopt;
    }
    std::memcpy(slot(from) + first * kGranule, payload.data(), payload.size());
    finalize_complete(first, last, now);
    return std::nullopt;
}

void OwnedShard::note_entry(Rank rank, Time entered_at) {
    if (entry_known_[rank]) return;
    entry_known_[rank] = true;
    entries_.insert(std::upper_bound(entries_.begin(), entries_.end(), entered_at), entered_at);
}

// Rule 1: the clock is started by the majority, because one started by the fastest rank would throw the others
// away; the first arrival only caps it.
Time OwnedShard::close_at(const Bounds& bounds) const {
    if (closed() || entries_.empty()) return kNever;
    const std::size_t majority = (shape_.ranks + 1u) / 2u;
    const Time cap = entries_.front() + bounds.scatter_cap;
    return entries_.size() < majority ? cap : std::min(cap, entries_[majority - 1] + bounds.scatter);
}

// Close by the clock: every granule becomes final with whoever delivered it.
void OwnedShard::close(Time now) {
    if (closed()) return;
    for (auto& settled : settled_) settled = shape_.ranks;
    finalize_complete(0, granules_, now);
}

// Make the settled granules of [first, last) final. Runs are cut where the set of contributors changes.
void OwnedShard::finalize_complete(std::uint32_t first, std::uint32_t last, Time now) {
    const auto due = [&](std::uint32_t g) { return settled_[g] == shape_.ranks && !final_.test(g); };
    while (first < last) {
        if (!due(first)) {
            ++first;
            continue;
        }
        std::uint32_t end = first + 1;
        while (end < last && due(end)) ++end;
        for (const auto& arrived : arrived_) end = arrived.run_end(first, end);
        finalize(first, end);
        first = end;
    }
    if (closed()) closed_at_ = now;
}

// Reduce [first, last), whose granules all have the same contributors. `direct`, if given, is the run itself in the
// contribution of `direct_rank`, which has not been copied to its slot.
void OwnedShard::finalize(std::uint32_t first, std::uint32_t last, Rank direct_rank, const float* direct) {
    const std::uint32_t at = first * kGranule;
    sources_.clear();
    for (Rank rank = 0; rank < shape_.ranks; ++rank) {
        if (!arrived_[rank].test(first)) continue;
        if (direct && rank == direct_rank)
            sources_.push_back(direct);
        else
            sources_.push_back(rank == shape_.self ? bucket_shard_ + at : slot(rank) + at);
    }
    const std::uint32_t coords = layout_.coords(shard_, first, last);
    const bool empty = sources_.empty() || coords == 0;
    if (!empty)
        non_finite_ |= codec::mean_in_order(sources_, coords, (bucket_shard_ ? bucket_shard_ : mean_) + at);
    final_.set(first, last);
    final_granules_ += last - first;
    append({first, last, empty});
}

void OwnedShard::append(Run run) {
    if (!runs_.empty() && runs_.back().last == run.first && runs_.back().empty == run.empty)
        runs_.back().last = run.last;
    else
        runs_.push_back(run);
}

std::optional<Run> OwnedShard::pending(Rank peer) const {
    const RunCursor at = cursors_[peer];
    if (ended_[peer] || at.run >= runs_.size()) return std::nullopt;
    Run run = runs_[at.run];
    run.first += at.granule;
    if (run.first < run.last) return run;
    if (at.run + 1 < runs_.size()) return runs_[at.run + 1];
    return std::nullopt;
}

void OwnedShard::advance(Rank peer, std::uint32_t granules) {
    RunCursor& at = cursors_[peer];
    const Run& run = runs_[at.run];
    if (run.first + at.granule == run.last) at = {at.run + 1, 0};
    at.granule += granules;
}

void OwnedShard::rewind(Rank peer, RunCursor to) { cursors_[peer] = to; }

void OwnedShard::compact(Block smaller) {
    std::memcpy(smaller.data(), mean_, layout_.length(shard_) * sizeof(float));
    memory_ = std::move(smaller);
    mean_ = memory_.data();
}

}  // namespace tailcut
