#include "protocol/ops/ops.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

#include "protocol/carry/carry.hpp"

namespace tailcut {
namespace {

// Lengths told apart in one op; more than these are noise or an attack.
constexpr std::size_t kMaxVariants = 3;
constexpr Seq kFreshOps = 4;  // retire() looks at all of the latest ops each time

}  // namespace

Ops::Ops(const Settings& settings, const OpContext& context, Roster& roster, Attendance& attendance,
         const Links& links, PeerPools& pools, Accounts& accounts, CloseListener* listener)
    : settings_(settings),
      context_(context),
      roster_(roster),
      attendance_(attendance),
      links_(links),
      pools_(pools),
      accounts_(accounts),
      listener_(listener),
      table_{{}, std::vector<std::set<Seq>>(settings.shape.ranks), settings.first_seq},
      retention_(settings, context, roster, links, accounts, table_),
      terms_(settings.terms),
      first_timed_(settings.first_seq) {}

// ---- the local rank ---------------------------------------------------------------------------------------

void Ops::enter(Time now, Ticket ticket, std::span<float> bucket, const Terms& terms) {
    terms_ = terms;
    terms_.residue = {};
    terms_len_ = static_cast<std::uint32_t>(bucket.size());
    if (terms.key != 0 && !terms.reliable.empty())
        reliable_[terms.key] = {terms_len_, terms.reliable};
    else if (terms.contribute)
        reliable_.erase(terms.key);
    const Seq seq = table_.next_seq++;
    Slot& slot = slot_of(seq);
    Op* op = variant(seq, slot, {terms_len_, terms.key, context_.epochs.at(seq).number}, true);
    if (!op->owns()) own(now, slot, *op, context_.memory.take(op->own_floats()));
    ++in_flight_;
    const bool contributing = contributing_ && terms.contribute;
    const Plan plan = context_.plan(seq, op->bucket());
    context_.carry.enter(plan);
    if (contributing) context_.carry.hand_over(plan, terms.loss_scale_tag, bucket);
    if (contributing && op->closed()) attendance_.note_late(now, seq, terms.key, roster_.self());
    op->enter(now, ticket, bucket, terms, contributing);
    for (Rank rank = 0; rank < roster_.ranks(); ++rank)
        if (roster_[rank].left(seq)) op->owner_left(rank);
    vote(now, slot, roster_.self(), op->bucket());
    end_if_complete(now, slot, *op);
    news_ = true;
}

void Ops::resynced() {
    contributing_ = true;
    context_.carry.drop_all();
    for (auto& [seq, slot] : table_.slots)
        for (auto& op : slot.variants)
            if (op->ended()) op->drop_late_contributions();
}

void Ops::jump(Time now) {
    const Seq group = roster_.group_seq(table_.next_seq);
    for (auto at = table_.slots.begin(); at != table_.slots.end() && at->first < group;
         at = table_.slots.erase(at))
        for (auto& op : at->second.variants) {
            if (settings_.record_fates) table_.note_served(*op);
            if (op->entered() && !op->ended()) {
                end(now, at->second, *op, Status::kBehind, Ending::kDeadline);
                reports_.back().behind_ops = group - at->first;
            }
        }
    for (auto& late : table_.late) late.erase(late.begin(), late.lower_bound(group));
    retention_.forget_before(group);
    table_.next_seq = group;
    contributing_ = false;
    note_skip();
}

void Ops::note_skip() {
    context_.carry.drop_means();
    if (in_flight_ == 0) skipped_to_ = table_.next_seq;
}

void Ops::cut_anew(Time now, Seq from) {
    for (auto at = table_.slots.lower_bound(from); at != table_.slots.end(); at = table_.slots.erase(at)) {
        for (auto& op : at->second.variants)
            if (op->entered() && !op->ended()) end(now, at->second, *op, Status::kVoid, Ending::kDeadline);
        context_.carry.give_back(at->first);
    }
    for (auto& late : table_.late) late.erase(late.lower_bound(from), late.end());
    context_.carry.drop_from(from);
    news_ = true;
}

// The senders reckon with a pool that holds nothing of the ops that were skipped.
void Ops::skip_to(Seq seq) {
    if (seq > table_.next_seq) {
        const Seq from = std::exchange(table_.next_seq, seq);
        retention_.skip(from);
        note_skip();
    }
    news_ = true;
    retire();
}

void Ops::abort(Time now) {
    for (auto& [seq, slot] : table_.slots)
        for (auto& op : slot.variants) {
            if (settings_.record_fates) table_.note_served(*op);
            if (op->entered() && !op->ended()) end(now, slot, *op, Status::kClosed, Ending::kDeadline);
        }
}

bool Ops::lags(Rank rank) const {
    return table_.next_seq - std::min(table_.next_seq, roster_[rank].entered) > in_flight_ + kFreshOps;
}

// ---- which ops there are ----------------------------------------------------------------------------------

Ops::Slot& Ops::slot_of(Seq seq) {
    return table_.slots.try_emplace(seq, Slot{BucketBallot(roster_.ranks()), {}, {}}).first->second;
}

Op* Ops::find(Seq seq, BucketId bucket) {
    const auto slot = table_.slots.find(seq);
    if (slot == table_.slots.end()) return nullptr;
    for (auto& op : slot->second.variants)
        if (op->bucket() == bucket) return op.get();
    return nullptr;
}

Op* Ops::variant(Seq seq, Slot& slot, BucketId bucket, bool own) {
    for (auto& op : slot.variants)
        if (op->bucket() == bucket) return op.get();
    // The local rank's own bucket always finds a place.
    if (slot.variants.size() + slot.retired.size() >= kMaxVariants && !own) return nullptr;
    slot.variants.push_back(std::make_unique<Op>(context_, context_.plan(seq, bucket), terms_.gather));
    if (const auto known = reliable_.find(bucket.key);
        !own && known != reliable_.end() && known->second.first == bucket.length)
        slot.variants.back()->set_reliable(known->second.second);
    if (own || slot.variants.size() == 1) pools_.note_op(seq, bucket.length);
    return slot.variants.back().get();
}

void Ops::vote(Time now, Slot& slot, Rank rank, BucketId bucket) {
    if (!slot.ballot.vote(rank, bucket)) return;
    for (auto& op : slot.variants) {
        if (op->bucket() != bucket) {
            op->abstain(rank, now);  // it will never deliver to this variant
            news_ = true;
        }
        if (op->entered() && !op->ended() &&
            slot.ballot.judge(op->bucket(), false) == BucketBallot::Verdict::kRefused)
            end(now, slot, *op, Status::kLengthMismatch, Ending::kDeadline);
        else
            end_if_complete(now, slot, *op);
    }
}

// ---- memory -----------------------------------------------------------------------------------------------

void Ops::own(Time now, Slot& slot, Op& op, Block memory) {
    op.own(std::move(memory));
    for (Rank rank = 0; rank < roster_.ranks(); ++rank) {
        if (roster_[rank].left(op.seq())) op.peer_left(rank, now);
        if (slot.ballot.against(rank, op.bucket())) op.abstain(rank, now);
    }
}

// Takes pool memory for an op that this rank has not reached. Means have precedence over contributions, and
// both over history.
Block Ops::room(std::size_t floats, wire::Stage stage, const Op& wanting, Time now) {
    if (!context_.memory.could_hold(floats)) return {};  // nothing that could be evicted would help
    for (;;) {
        if (Block block = retention_.room(floats)) return block;
        if (stage == wire::Stage::kScatter || !evict_shard(wanting, now)) return {};
    }
}

// The latest shard goes of which nothing is final: what was sent of a mean may have to be sent again, and stays as it is.
bool Ops::evict_shard(const Op& wanting, Time now) {
    Op* victim = nullptr;
    for (auto& [seq, slot] : table_.slots)
        for (auto& op : slot.variants)
            if (op.get() != &wanting && !op->entered() && op->owns() && !op->reduced() &&
                op->own_final() == 0)
                victim = op.get();
    if (!victim) return false;
    victim->evict(now);
    note_closed(*victim);
    ++accounts_.counters.evicted_shards;
    news_ = true;
    return true;
}

// ---- from the network -------------------------------------------------------------------------------------

bool Ops::over(const wire::Header& header) const {
    if (header.seq >= table_.next_seq) return false;
    const auto slot = table_.slots.find(header.seq);
    if (slot == table_.slots.end()) return true;
    const auto& retired = slot->second.retired;
    return std::find(retired.begin(), retired.end(), bucket_of(header)) != retired.end();
}

std::optional<wire::Reject> Ops::deliver(Time now, const wire::Header& header,
                                         std::span<const std::byte> payload) {
    Slot& slot = slot_of(header.seq);
    Op* op = variant(header.seq, slot, bucket_of(header), false);
    if (!op) return wire::Reject::kLength;
    first_timed_ = std::min(first_timed_, header.seq);
    if (header.entry_us != wire::kNotEntered) vote(now, slot, header.source, bucket_of(header));
    const std::uint32_t final_before = op->own_final();
    const auto reason = header.stage() == wire::Stage::kScatter ? scatter(now, slot, *op, header, payload)
                                                                : gather(now, *op, header, payload);
    if (reason) return reason;
    op->count_received(wire::kHeaderBytes + payload.size());
    news_ |= op->own_final() != final_before;
    end_if_complete(now, slot, *op);
    return std::nullopt;
}

std::optional<wire::Reject> Ops::scatter(Time now, Slot& slot, Op& op, const wire::Header& header,
                                         std::span<const std::byte> payload) {
    if (!op.owns()) {
        Block block = room(op.own_floats(), wire::Stage::kScatter, op, now);
        if (!block) return wire::Reject::kPool;
        own(now, slot, op, std::move(block));
    }
    if (header.flags & wire::kOver) table_.late[header.source].insert(header.seq);
    // A packet that has waited in front of the own port tells of an entry as long ago.
    const Duration age =
        Duration{header.entry_us} * kMicrosecond + links_[header.source].arrivals.queued(now, header);
    const auto reason = op.scatter(now, header, payload, now - std::min(age, terms_.bounds.deadline));
    if (reason != wire::Reject::kLate) return reason;
    op.count_late();
    return note_late(now, header, payload);
}

std::optional<wire::Reject> Ops::note_late(Time now, const wire::Header& header,
                                           std::span<const std::byte> payload) {
    const Plan plan = context_.plan(header.seq, bucket_of(header));
    std::optional<wire::Reject> reason;
    if (header.stage() == wire::Stage::kGather) {
        reason = context_.carry.place(now, plan, header, payload);
    } else {
        reason = context_.carry.contribute(plan, header, payload);
        if ((header.flags & wire::kLastPart) && !header.empty())
            attendance_.note_late(now, header.seq, header.key, header.source);
    }
    if (!reason || reason == wire::Reject::kLate) accounts_.note_late(now, header, payload.size());
    return reason;
}

std::optional<wire::Reject> Ops::gather(Time now, Op& op, const wire::Header& header,
                                        std::span<const std::byte> payload) {
    // It does not touch a bucket that was handed back, and nothing is kept for an op that was skipped.
    if (op.ended() || (!op.entered() && op.seq() < table_.next_seq)) return note_late(now, header, payload);
    if (!op.holds()) {
        // A rank that multicasts may have ignored our lack of room, so no contribution is evicted for its
        // mean.
        const auto stage = header.multicast() ? wire::Stage::kScatter : wire::Stage::kGather;
        Block block = room(op.layout().bucket_len, stage, op, now);
        if (!block) return wire::Reject::kPool;
        op.hold(std::move(block));
    }
    return op.gather(now, header, payload);
}

void Ops::peer_left(Time now, Rank rank, Seq from) {
    for (auto at = table_.slots.lower_bound(from); at != table_.slots.end(); ++at)
        for (auto& op : at->second.variants) {
            op->peer_left(rank, now);
            op->serve_apart(rank);
            if (op->entered() && !op->ended()) op->owner_left(rank);
            end_if_complete(now, at->second, *op);
        }
    news_ = true;
}

// ---- a mean that is shared beyond the group ---------------------------------------------------------------

bool Ops::will_close(Seq seq) const {
    if (seq >= table_.next_seq) return true;
    const auto slot = table_.slots.find(seq);
    return slot != table_.slots.end() &&
           std::any_of(slot->second.variants.begin(), slot->second.variants.end(),
                       [](const auto& op) { return op->entered() && !op->ended(); });
}

void Ops::close(Time now, Seq seq) {
    const auto slot = table_.slots.find(seq);
    if (slot == table_.slots.end()) return;
    for (auto& op : slot->second.variants)
        if (op->owns()) {
            op->close(now, Ending::kBound, terms_.skip_above);
            end_if_complete(now, slot->second, *op);
        }
}

bool Ops::overtaken(Seq seq) const {
    const auto slot = table_.slots.find(seq);
    return seq >= table_.next_seq && slot != table_.slots.end() &&
           std::any_of(slot->second.variants.begin(), slot->second.variants.end(),
                       [](const auto& op) { return op->owns() && op->reduced(); });
}

void Ops::reduce(Time now, Seq seq, std::uint32_t bucket_len, bool non_finite,
                 const std::function<void(Reduction&)>& put) {
    Op* op = find(seq, {bucket_len, 0, context_.epochs.at(seq).number});
    if (!op || op->reduced()) return;
    put(op->reduction());
    op->reduce_more(non_finite);
    news_ = true;
    end_if_complete(now, table_.slots.at(seq), *op);
}

// ---- the end of ops ---------------------------------------------------------------------------------------

void Ops::note_closed(Op& op) {
    if (!op.closed()) return;
    const Time due = op.close_due_at(bounds_of(op));
    if (op.take_closed()) attendance_.note_close(op.seq(), op.bucket().key, op.came_by_close(), due);
    if (listener_) listener_->on_close(op, due);
    // A rank that is behind keeps only the mean, so that it can serve its shard for long.
    if (op.entered() || !op.reduced() || op.compacted()) return;
    if (Block smaller = context_.memory.take_pool(op.compact_floats())) op.compact(std::move(smaller));
}

void Ops::end_if_complete(Time now, Slot& slot, Op& op) {
    note_closed(op);
    if (op.complete())
        end(now, slot, op, Status::kComplete, Ending::kAll);
    else if (op.gathered())
        end(now, slot, op, Status::kPartial, Ending::kAll);
}

void Ops::end(Time now, Slot& slot, Op& op, Status status, Ending ending) {
    // The own contribution goes back to the caller with the bucket, so the shard closes now.
    op.close(now, ending, terms_.skip_above);
    note_closed(op);
    const bool awaited = settings_.resend && links_.awaits(op.seq());
    OpReport report = op.end(now, status, ending, awaited, settings_.record_fates);
    if (status != Status::kComplete) roster_.note_partial(report.entered_at);
    accounts_.complete(report, op);
    if (status == Status::kVoid) {
        op.take_means();
    } else if (ReceivedMeans means = op.take_means(); context_.carries(means.plan())) {
        means.reopen();
        if (status <= Status::kPartial && !op.non_finite() && means.lacking())
            context_.carry.keep(std::move(means));
        for (auto& late : table_.late) late.insert(op.seq());
    }
    report.lr_scale = roster_.lr_scale();
    report.heard_epoch = context_.epochs.heard();
    if (status == Status::kLengthMismatch) {
        const BucketBallot& ballot = slot.ballot;
        for (Rank rank = 0; rank < roster_.ranks(); ++rank)
            report.stated_lengths.push_back(
                ballot.voted()[rank] ? std::optional(ballot.buckets()[rank].length) : std::nullopt);
    }
    reports_.push_back(std::move(report));
    --in_flight_;
    news_ = true;
}

void Ops::retire() {
    skip_untimed();
    context_.carry.retire(table_.next_seq);
    retention_.retire(std::min(first_timed_, table_.next_seq - std::min(table_.next_seq, kFreshOps)));
}

std::vector<OpReport> Ops::take_open() {
    std::vector<OpReport> open;
    for (auto at = table_.slots.lower_bound(std::min(told_from_, first_timed_)); at != table_.slots.end();
         ++at)
        for (auto& op : at->second.variants)
            if (!op->ended() && (op->entered() || op->own_final() > 0) && op->take_progress())
                open.push_back(op->so_far());
    told_from_ = first_timed_;
    return open;
}

// ---- time -------------------------------------------------------------------------------------------------

// An op that the local rank has not entered has the bounds of the rank's latest op, stretched if its bucket
// is longer.
Bounds Ops::bounds_of(const Op& op) const {
    Bounds bounds = terms_.bounds;
    if (op.entered() || op.layout().bucket_len <= terms_len_) return bounds;
    const double longer = static_cast<double>(op.layout().bucket_len) / std::max(1u, terms_len_);
    const auto stretch = [&](Duration& bound) {
        bound = static_cast<Duration>(
            std::min(longer * static_cast<double>(bound), static_cast<double>(bounds.deadline)));
    };
    stretch(bounds.scatter);
    stretch(bounds.scatter_cap);
    stretch(bounds.scatter_grace);
    return bounds;
}

void Ops::skip_untimed() {
    const auto untimed = [](const auto& op) {
        return (op->ended() || !op->entered()) && (!op->owns() || op->closed());
    };
    auto at = table_.slots.lower_bound(first_timed_);
    while (at != table_.slots.end() && at->first < table_.next_seq &&
           std::all_of(at->second.variants.begin(), at->second.variants.end(), untimed))
        ++at;
    first_timed_ = at == table_.slots.end() ? table_.next_seq : std::min(table_.next_seq, at->first);
}

Time Ops::next_timer() const {
    Time next = kNever;
    for (auto at = table_.slots.lower_bound(first_timed_); at != table_.slots.end(); ++at)
        for (const auto& op : at->second.variants)
            next = std::min({next, op->close_at(bounds_of(*op)).at, op->end_at().at});
    return next;
}

void Ops::advance(Time now) {
    for (std::size_t silent = roster_.silent_count();;) {
        for (auto at = table_.slots.lower_bound(first_timed_); at != table_.slots.end(); ++at) {
            Slot& slot = at->second;
            for (auto& op : slot.variants) {
                if (silent > 0) {
                    op->give_up_silent(now);
                    end_if_complete(now, slot, *op);
                }
                for (StageEnd close; (close = op->close_at(bounds_of(*op))).at <= now;) {
                    op->cut(now, close.by, terms_.skip_above);
                    news_ = true;
                    end_if_complete(now, slot, *op);
                }
                if (const auto ending = op->end_at(); ending.at <= now) {
                    const auto verdict = slot.ballot.judge(op->bucket(), true);
                    const bool refused = verdict == BucketBallot::Verdict::kRefused;
                    end(now, slot, *op, refused ? Status::kLengthMismatch : Status::kPartial, ending.by);
                }
            }
        }
        // Ranks that were just found silent are no longer waited for, so more ops may be due.
        if (std::exchange(silent, roster_.silent_count()) >= roster_.silent_count()) break;
    }
    skip_untimed();
}

}  // namespace tailcut
