#include "protocol/owned_shard.hpp"

#include <algorithm>
#include <utility>

namespace tailcut {

OwnedShard::OwnedShard(const OpContext& context, std::uint32_t granules, std::unique_ptr<Reduction> values)
    : context_(context),
      shape_(context.shape),
      granules_(granules),
      values_(std::move(values)),
      arrived_(shape_.ranks, GranuleSet(granules)),
      decided_(granules),
      complete_(granules),
      final_(granules),
      ended_(shape_.ranks),
      left_(shape_.ranks),
      abstains_(shape_.ranks),
      entered_at_(shape_.ranks, -1),
      last_at_(shape_.ranks, -1),
      ripe_at_(shape_.ranks, -1),
      unripe_(shape_.ranks),
      covered_(context.audience.present),
      cursors_(shape_.ranks + 1u) {}

void OwnedShard::enter(Time now, float* bucket_shard, bool contributing, const Coding& gather) {
    values_->leave_pool();
    values_->take_over(runs_, bucket_shard);
    if (reduced()) return;
    values_->enter(bucket_shard, gather);
    if (closed()) return;
    note_entry(shape_.self, now);
    ripen(shape_.self, now);
    if (!contributing) return abstain(shape_.self, now);
    arrived_[shape_.self].set(0, granules_);
    for (auto& ranks : decided_) ++ranks;
    reduce_complete(0, granules_, now);
}

void OwnedShard::hand_back(bool awaited) {
    bool needed = awaited;
    for (Rank peer = 0; peer < shape_.ranks; ++peer)
        needed |= peer != shape_.self && (!served(peer) || late(peer));
    values_->hand_back(needed);
}

void OwnedShard::abstain(Rank rank, Time now) {
    if (closed() || abstains_[rank]) return;
    abstains_[rank] = true;
    ripen(rank, now);
    for (std::uint32_t g = 0; g < granules_; ++g) decided_[g] += !arrived_[rank].test(g);
    reduce_complete(0, granules_, now);
}

void OwnedShard::peer_ended(Rank rank, Time now) {
    ended_[rank] = true;
    lose(rank, now);
}

void OwnedShard::peer_left(Rank rank, Time now) {
    left_[rank] = true;
    lose(rank, now);
}

void OwnedShard::lose(Rank rank, Time now) {
    serve_apart(rank);
    if (alone()) return close(now, Ending::kDeadline);
    abstain(rank, now);
}

// Nobody else will apply the mean. It is void then: the owner's replica must not part by its own gradient from those of ranks
// that are still in the group. When all the others have left there is none to part from.
bool OwnedShard::alone() const {
    if (values_->shared_beyond_group()) return false;
    bool others = false;
    for (Rank rank = 0; rank < shape_.ranks; ++rank) {
        if (rank == shape_.self || left_[rank]) continue;
        if (!ended_[rank] && !context_.silent[rank]) return false;
        others = true;
    }
    return others;
}

// What is not final yet becomes EMPTY.
void OwnedShard::drop_arrived() {
    for (GranuleSet& arrived : arrived_) arrived.keep_only(final_);
}

std::optional<wire::Reject> OwnedShard::contribute(const wire::Header& header, std::uint32_t first,
                                                   std::uint32_t last, std::span<const std::byte> payload,
                                                   Time now) {
    const Rank from = header.source;
    if (closed() || abstains_[from]) return wire::Reject::kLate;
    if (arrived_[from].any(first, last)) return wire::Reject::kDuplicate;
    arrived_[from].set(first, last);
    last_at_[from] = now;
    if (header.flags & wire::kLastPart) ripen(from, now);
    if (first == last) return std::nullopt;  // trimmed to nothing
    for (std::uint32_t g = first; g < last; ++g) ++decided_[g];
    values_->offer(header, first, last, payload);
    reduce_complete(first, last, now);
    values_->save();
    return std::nullopt;
}

void OwnedShard::note_entry(Rank rank, Time entered_at) {
    if (entered_at_[rank] >= 0) return;
    entered_at_[rank] = entered_at;
    entries_.insert(std::upper_bound(entries_.begin(), entries_.end(), entered_at), entered_at);
}

void OwnedShard::ripen(Rank rank, Time now) {
    if (ripe_at_[rank] >= 0) return;
    ripe_at_[rank] = now;
    --unripe_;
}

// When the last parts of all ranks had come but for the silent ones.
Time OwnedShard::ripe_at() const {
    if (unripe_ > context_.silent_count || unripe_ == shape_.ranks) return kNever;
    Time at = 0;
    for (Rank rank = 0; rank < shape_.ranks; ++rank) {
        if (ripe_at_[rank] < 0 && !context_.silent[rank]) return kNever;
        at = std::max(at, ripe_at_[rank]);
    }
    return at;
}

// Rule 1: the clock is started by the majority, because one started by the fastest rank would throw the others
// away; the first arrival only caps it.
OwnedShard::Close OwnedShard::close_at(const Bounds& bounds) const {
    if (closed() || entries_.empty()) return {};
    Close close{entries_.front() + bounds.scatter_cap, Ending::kBound};
    if (entries_.size() >= majority())
        close.at = std::min(close.at, entries_[majority() - 1] + bounds.scatter);
    const Duration grace = std::max(bounds.scatter_grace, context_.repeat_time);
    const Time ripe = ripe_at();
    if (ripe != kNever && ripe + grace < close.at) close = {ripe + grace, Ending::kGrace};
    return close;
}

// What is missing of the mean, as a share of its energy: of m among n independent contributions n/m - 1, of none all.
double OwnedShard::lacking() const {
    double live = 0, sum = 0;
    for (Rank rank = 0; rank < shape_.ranks; ++rank) live += !context_.silent[rank] && !abstains_[rank];
    for (std::uint32_t g = 0; g < granules_; ++g) {
        if (final_.test(g)) continue;
        const auto came = static_cast<double>(std::count_if(
            arrived_.begin(), arrived_.end(), [&](const GranuleSet& set) { return set.test(g); }));
        sum += came > 0 ? std::max(0.0, live / came - 1) : 1;
    }
    return sum / granules_;
}

// Close by the clock: every granule becomes final with whoever delivered it.
void OwnedShard::close(Time now, Ending ending, float skip_above) {
    if (closed()) return;
    ending_ = ending;
    if (alone()) {
        drop_arrived();
    } else if (skip_above > 0 && lacking() > skip_above) {
        delivered_ = arrived_;
        drop_arrived();
    }
    for (auto& ranks : decided_) ranks = shape_.ranks;
    reduce_complete(0, granules_, now);
}

// Hand on the granules of [first, last) that all ranks have decided, and take in what becomes final by it.
void OwnedShard::reduce_complete(std::uint32_t first, std::uint32_t last, Time now) {
    const auto due = [&](std::uint32_t g) { return decided_[g] == shape_.ranks && !complete_.test(g); };
    for (std::uint32_t end; first < last; first = end) {
        end = first + 1;
        if (!due(first)) continue;
        while (end < last && due(end)) ++end;
        complete_.set(first, end);
        complete_granules_ += end - first;
        non_finite_ |= values_->reduce(first, end, arrived_, fresh_);
        take_fresh();
    }
    if (closed()) closed_at_ = now;
}

void OwnedShard::reduce_more() {
    non_finite_ |= values_->reduce(0, 0, arrived_, fresh_);
    take_fresh();
}

void OwnedShard::give_up() {
    if (reduced()) return;
    values_->give_up();
    reduce_more();
}

void OwnedShard::take_fresh() {
    for (const Run& run : fresh_) {
        final_.set(run.first, run.last);
        final_granules_ += run.last - run.first;
        append(run);
    }
    fresh_.clear();
}

void OwnedShard::append(Run run) {
    if (!runs_.empty() && runs_.back().last == run.first && runs_.back().empty == run.empty)
        runs_.back().last = run.last;
    else
        runs_.push_back(run);
}

std::optional<Run> OwnedShard::pending(Rank peer) const {
    if (peer == shape_.ranks ? covered_.none() : ended_[peer] || covers(peer)) return std::nullopt;
    return unsent(peer);
}

std::optional<Run> OwnedShard::unsent(Rank peer) const {
    const RunCursor at = cursors_[peer];
    if (at.run >= runs_.size()) return std::nullopt;
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

void OwnedShard::serve_apart(Rank peer) {
    if (!covers(peer)) return;
    covered_.reset(static_cast<std::size_t>(context_.audience.index(peer)));
    cursors_[peer] = cursors_[shape_.ranks];
}

void OwnedShard::rewind(Rank peer, RunCursor to) { cursors_[peer] = to; }

}  // namespace tailcut
