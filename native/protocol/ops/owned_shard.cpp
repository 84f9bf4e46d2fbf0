#include "protocol/ops/owned_shard.hpp"

#include <algorithm>
#include <utility>

#include "protocol/carry/carry.hpp"
#include "protocol/ops/attendance.hpp"

namespace tailcut {

OwnedShard::OwnedShard(const OpContext& context, const Plan& plan, std::unique_ptr<Reduction> values)
    : context_(context),
      shape_(context.shape),
      plan_(plan),
      granules_(plan.layout.granules(plan.own_shard())),
      values_(std::move(values)),
      arrived_(shape_.ranks, GranuleSet(granules_)),
      decided_(granules_),
      complete_(granules_),
      final_(granules_),
      reliable_(granules_),
      awaited_(context.attendance.awaited(plan.seq, plan.bucket.key)),
      ended_(shape_.ranks),
      left_(shape_.ranks),
      last_came_(shape_.ranks),
      abstains_(shape_.ranks),
      decided_by_(shape_.ranks),
      clock_(shape_.ranks, static_cast<std::size_t>(std::ranges::count(awaited_, true))),
      covered_(context.audience.present),
      cursors_(shape_.ranks + 1u) {
    values_->expect(abstains_);
    for (Rank rank = 0; rank < shape_.ranks; ++rank) {
        if (!awaited_[rank]) decide(rank, 0);
        // Nothing is kept for what the dead might contribute late.
        abstains_[rank] = !plan_.epoch.member(rank) && context_.roster.silent(rank);
    }
}

void OwnedShard::enter(Time now, float* bucket_shard, bool contributing, const Coding& gather) {
    values_->leave_pool();
    if (LateShard* late = context_.carry.late_shard(plan_)) {  // the own contribution may be late too
        if (contributing)
            late->put_own({bucket_shard, plan_.layout.length(plan_.own_shard())});
        else
            late->abstain(shape_.self);
    }
    values_->take_over(runs_, bucket_shard);
    if (granules_ == 0) closed_at_ = now;
    if (reduced()) return;
    values_->enter(bucket_shard, gather);
    if (closed()) return;
    note_entry(shape_.self, now);
    clock_.note_last_part(shape_.self, now);
    if (!contributing && stale()) close(now, Ending::kDeadline);
    if (!contributing) return abstain(shape_.self, now);
    for (std::uint32_t g = 0; g < granules_; ++g) {
        if (final_.test(g)) continue;  // closed by the clock, before the entry
        arrived_[shape_.self].set(g, g + 1);
        decided_[g] += !complete_.test(g) && !decided_by_[shape_.self];
    }
    reduce_decided(now);
}

std::vector<bool> OwnedShard::came() const {
    std::vector<bool> came = last_came_;
    for (Rank rank = 0; rank < shape_.ranks; ++rank)
        came[rank] = came[rank] || abstains_[rank] || delivered(rank).all(0, granules_);
    return came;
}

void OwnedShard::set_reliable(const GranuleSet& granules) {
    reliable_ = granules;
    reliable_.remove(complete_);
}

void OwnedShard::hand_back(bool awaited) {
    bool needed = awaited;
    for (Rank peer = 0; peer < shape_.ranks; ++peer)
        needed |= peer != shape_.self && (!served(peer) || late(peer));
    values_->hand_back(needed);
}

void OwnedShard::abstain(Rank rank, Time now) {
    if (LateShard* late = context_.carry.late_shard(plan_)) late->abstain(rank);
    if (closed()) return;
    abstains_[rank] = true;
    decide(rank, now);
}

void OwnedShard::decide(Rank rank, Time now) {
    if (closed() || decided_by_[rank]) return;
    decided_by_[rank] = true;
    clock_.note_last_part(rank, now);
    for (std::uint32_t g = 0; g < granules_; ++g) decided_[g] += !arrived_[rank].test(g);
    reduce_decided(now);
}

void OwnedShard::peer_ended(Rank rank, Time now) {
    ended_[rank] = true;
    lose(rank, now);
}

void OwnedShard::peer_left(Rank rank, Time now) {
    left_[rank] = true;
    if (!closed()) abstains_[rank] = true;
    lose(rank, now);
}

void OwnedShard::lose(Rank rank, Time now) {
    serve_apart(rank);
    if (alone()) return close(now, Ending::kDeadline);
    if (context_.carries(plan_))
        decide(rank, now);  // what it has not delivered is late
    else
        abstain(rank, now);
}

// Whether nobody else will apply the mean. Then the mean is void: applying it alone would make the owner's
// replica diverge from those of ranks that are still in the group. If all other ranks have left, there is no
// replica to diverge from, and the owner applies it.
bool OwnedShard::alone() const {
    if (values_->shared_beyond_group()) return false;
    if (stale()) return true;
    bool others = false;
    for (Rank rank = 0; rank < shape_.ranks; ++rank) {
        if (rank == shape_.self || left_[rank] || !plan_.epoch.member(rank)) continue;
        if (!ended_[rank] && !context_.roster.silent(rank)) return false;
        others = true;
    }
    return others;
}

// Whether the others are so far ahead that they may not take the mean in any more (rule 9).
bool OwnedShard::stale() const {
    return context_.carries(plan_) && context_.carry.too_late(context_.roster.behind_ops(plan_.seq));
}

// Whatever is not final yet becomes EMPTY.
void OwnedShard::drop_arrived() {
    for (GranuleSet& arrived : arrived_) arrived.keep_only(final_);
}

std::optional<wire::Reject> OwnedShard::contribute(const wire::Header& header, std::uint32_t first,
                                                   std::uint32_t last, std::span<const std::byte> payload,
                                                   Time now) {
    const Rank from = header.source;
    if (closed() || abstains_[from]) return wire::Reject::kLate;
    if (header.flags & wire::kLastPart) last_came_[from] = true;
    if (arrived_[from].any(first, last)) return wire::Reject::kDuplicate;
    // What is not final can take it in, even if nobody waits for it. The rest of it is late. Only raw has runs of
    // which a part is final, and their values can be cut anywhere.
    const bool late = final_.any(first, last);
    if (!decided_by_[from] && (first == last || !final_.all(first, last))) {
        clock_.note_packet(from, now);
        if (header.flags & wire::kLastPart) clock_.note_last_part(from, now);
    }
    for (std::uint32_t g = first, end; g < last; g = end) {
        end = final_.run_end(g, last);
        if (final_.test(g)) continue;
        arrived_[from].set(g, end);
        for (std::uint32_t k = g; k < end && !decided_by_[from]; ++k) decided_[k] += !complete_.test(k);
        values_->offer(header, g, end, payload.subspan(late ? (g - first) * kGranule * sizeof(float) : 0));
        reduce_complete(g, end, now);
        values_->save();
    }
    return late ? std::optional(wire::Reject::kLate) : std::nullopt;
}

// The part of the mean that is missing, as a share of its energy: n/m - 1 for m of n independent
// contributions, 1 for none.
double OwnedShard::lacking(const GranuleSet& held) const {
    double live = 0, sum = 0;
    for (Rank rank = 0; rank < shape_.ranks; ++rank)
        live += !context_.roster.silent(rank) && !abstains_[rank];
    for (std::uint32_t g = 0; g < granules_; ++g) {
        if (final_.test(g) || held.test(g)) continue;
        const auto came = static_cast<double>(std::count_if(
            arrived_.begin(), arrived_.end(), [&](const GranuleSet& set) { return set.test(g); }));
        sum += came > 0 ? std::max(0.0, live / came - 1) : 1;
    }
    return sum / granules_;
}

bool OwnedShard::awaits_reliable() const {
    if (closed() || reliable_.none()) return false;
    for (Rank rank = 0; rank < shape_.ranks; ++rank)
        if (awaits(rank) && !arrived_[rank].contains(reliable_)) return true;
    return false;
}

// The reliable granules that a rank which is awaited has still to deliver.
GranuleSet OwnedShard::held() const {
    GranuleSet held(granules_);
    for (Rank rank = 0; rank < shape_.ranks; ++rank) {
        if (!awaits(rank)) continue;
        GranuleSet missing = reliable_;
        missing.remove(arrived_[rank]);
        held |= missing;
    }
    return held;
}

StageEnd OwnedShard::close_at(const Bounds& bounds) const {
    if (closed()) return {};
    StageEnd end = clock_.end_at(bounds, context_.roster);
    if (const Time left = absent_left_at(bounds); left < end.at) end = {left, Ending::kAbsent};
    return cut_at_ >= 0 && awaits_reliable() ? clock_.reliable_end_at(bounds) : end;
}

// When most ranks have delivered everything and the rest is still computing, the rest is late, and is carried.
Time OwnedShard::absent_left_at(const Bounds& bounds) const {
    if (bounds.absent == 0 || !context_.carries(plan_)) return kNever;
    const LastParts& parts = clock_.last_parts();
    std::size_t present = 0, delivered = 0;
    Time last = 0;
    for (Rank rank = 0; rank < shape_.ranks; ++rank) {
        if (!awaited_[rank] || context_.roster.silent(rank)) continue;
        ++present;
        if (parts.at(rank) >= 0) {
            ++delivered;
            last = std::max(last, parts.at(rank));
        } else if (clock_.entered_at(rank) >= 0 || context_.roster[rank].entered > plan_.seq) {
            return kNever;  // what it sends is on its way
        }
    }
    return delivered < present && 2 * delivered > present ? last + bounds.absent : kNever;
}

void OwnedShard::cut(Time now, Ending ending, float skip_above) {
    if (ending == Ending::kDeadline) return close(now, ending, skip_above);
    close_but(held(), now, ending, skip_above);
    if (!closed() && cut_at_ < 0) cut_at_ = now;
}

void OwnedShard::close(Time now, Ending ending, float skip_above) {
    close_but(GranuleSet(granules_), now, ending, skip_above);
}

void OwnedShard::close(Time now, std::uint32_t first, std::uint32_t last) {
    for (std::uint32_t g = first; g < last; ++g)
        if (!complete_.test(g)) decided_[g] = shape_.ranks;
    reduce_complete(first, last, now);
}

// Every granule that is not held becomes final with the contributions that arrived. If the op is skipped, or nobody
// is left to apply it, nothing is held.
void OwnedShard::close_but(const GranuleSet& held, Time now, Ending ending, float skip_above) {
    if (closed()) return;
    ending_ = ending;
    reliable_ = held;
    if (alone()) {
        reliable_ = GranuleSet(granules_);
        const std::vector<GranuleSet> arrived = arrived_;
        drop_arrived();
        if (context_.carries(plan_)) {  // it counts in the next op
            for (std::uint32_t g = 0, end; g < granules_; g = end) {
                end = final_.run_end(g, granules_);
                if (!final_.test(g))
                    context_.carry.await(context_, plan_, values_->loss_scale_tag, g, end, arrived_,
                                         abstains_, {});
            }
            values_->hand_on(arrived, final_);
            // What is carried is for those that apply it: if they are ahead, it enters an op that they are in.
            if (stale() || std::find(ended_.begin(), ended_.end(), true) != ended_.end()) values_->skip();
        }
    } else if (skip_above > 0 && lacking(held) > skip_above) {
        reliable_ = GranuleSet(granules_);
        delivered_ = arrived_;
        drop_arrived();
        values_->skip();
    }
    for (std::uint32_t g = 0; g < granules_; ++g)
        if (!reliable_.test(g)) decided_[g] = shape_.ranks;
    put_off_alone();
    reduce_complete(0, granules_, now);
}

// Rule 9: where the contributions of all others are late, a mean of the own one alone would err by more than none. It
// is late too, and enters the next mean with theirs.
void OwnedShard::put_off_alone() {
    // Of two, one alone errs as none.
    if (!context_.carries(plan_) || plan_.members() < 3 || plan_.layout.length(plan_.own_shard()) == 0)
        return;
    GranuleSet others(granules_);
    bool expected = false;
    for (Rank rank = 0; rank < shape_.ranks; ++rank) {
        if (rank == shape_.self) continue;
        others |= arrived_[rank];
        expected |= !abstains_[rank];
    }
    if (!expected || others.all(0, granules_)) return;
    bool found = false;
    for (std::uint32_t first = 0, last; first < granules_; first = last) {
        last = values_->unit_end(first);
        bool alone =
            arrived_[shape_.self].all(first, last) && !others.any(first, last) && !final_.any(first, last);
        for (std::uint32_t g = first; alone && g < last; ++g)
            alone = complete_.test(g) || decided_[g] == shape_.ranks;
        if (!alone) continue;
        arrived_[shape_.self].clear(first, last);
        context_.carry.await(context_, plan_, values_->loss_scale_tag, first, last, arrived_, abstains_, {});
        if (context_.carry.late_shard(plan_))
            found = true;
        else  // there is no memory for it
            arrived_[shape_.self].set(first, last);
    }
    if (!found) return;
    last_came_[shape_.self] = true;  // this rank was there
    values_->hand_on(std::vector<GranuleSet>(shape_.ranks, GranuleSet(granules_)), final_);
}

void OwnedShard::reduce_decided(Time now) {
    bool awaits_others = false;
    for (Rank rank = 0; rank < shape_.ranks; ++rank)
        awaits_others |= rank != shape_.self && !decided_by_[rank];
    if (!awaits_others) put_off_alone();
    reduce_complete(0, granules_, now);
}

// Hands on the granules of [first, last) that all ranks have decided, and takes in what becomes final by
// that.
void OwnedShard::reduce_complete(std::uint32_t first, std::uint32_t last, Time now) {
    const auto due = [&](std::uint32_t g) { return decided_[g] == shape_.ranks && !complete_.test(g); };
    for (std::uint32_t end; first < last; first = end) {
        end = first + 1;
        if (!due(first)) continue;
        while (end < last && due(end)) ++end;
        complete_.set(first, end);
        complete_granules_ += end - first;
        if (values_->reduce(first, end, arrived_, fresh_)) note_non_finite();
        take_fresh();
    }
    if (closed()) closed_at_ = now;
}

// Rule 10: nobody applies the op, so nothing is carried into it or out of it.
void OwnedShard::note_non_finite() {
    non_finite_ = true;
    values_->skip();
    context_.carry.skip(plan_.seq, plan_.seq + 1);
}

void OwnedShard::reduce_more() {
    non_finite_ |= values_->reduce(0, 0, arrived_, fresh_);
    take_fresh();
}

void OwnedShard::leave_rest_empty() {
    if (reduced()) return;
    values_->leave_rest_empty();
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

std::optional<Run> OwnedShard::pending(Destination to) const {
    if (to.is_everybody() ? covered_.none() : ended_[to.rank()] || covers(to)) return std::nullopt;
    return unsent(to);
}

std::optional<Run> OwnedShard::unsent(Destination to) const {
    if (!to.is_everybody() && !context_.roster[to.rank()].wants(plan_.seq)) return std::nullopt;
    const RunCursor at = cursor(to);
    if (at.run >= runs_.size()) return std::nullopt;
    Run run = runs_[at.run];
    run.first += at.granule;
    if (run.first < run.last) return run;
    if (at.run + 1 < runs_.size()) return runs_[at.run + 1];
    return std::nullopt;
}

void OwnedShard::advance(Destination to, std::uint32_t granules) {
    RunCursor& at = cursors_[to.place(shape_.ranks)];
    const Run& run = runs_[at.run];
    if (run.first + at.granule == run.last) at = {at.run + 1, 0};
    at.granule += granules;
}

void OwnedShard::serve_apart(Rank peer) {
    if (!covers(peer)) return;
    covered_.reset(static_cast<std::size_t>(context_.audience.index(peer)));
    cursors_[peer] = cursor(Destination::everybody());
}

}  // namespace tailcut
