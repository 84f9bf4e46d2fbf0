// The life of an endpoint's ops: memory, votes, ends, retirement; the group's progress; time.
#include <algorithm>
#include <functional>

#include "protocol/endpoint.hpp"

namespace tailcut {
namespace {

constexpr std::size_t kMaxVariants = 3;  // lengths told apart in one op; more is noise or an attack

}  // namespace

// ---- ops --------------------------------------------------------------------------------------------------

Endpoint::Slot& Endpoint::slot_of(Seq seq) {
    return slots_.try_emplace(seq, Slot{Ballot(settings_.shape.ranks), {}, {}}).first->second;
}

template <typename Predicate>
void Endpoint::forget(Slot& slot, Predicate over) {
    std::erase_if(slot.variants, [&](const auto& op) {
        if (!over(*op)) return false;
        if (op->owns()) slot.forgotten.push_back(op->layout().bucket_len);
        return true;
    });
}

Op* Endpoint::variant(Seq seq, Slot& slot, std::uint32_t bucket_len, bool own_length) {
    for (auto& op : slot.variants)
        if (op->layout().bucket_len == bucket_len) return op.get();
    // The local rank's own length always finds a place.
    if (slot.variants.size() + slot.forgotten.size() >= kMaxVariants && !own_length) return nullptr;
    slot.variants.push_back(std::make_unique<Op>(context_, seq, bucket_len, terms_.planes));
    if (own_length || slot.variants.size() == 1)
        recent_bytes_[seq % recent_bytes_.size()] = slot.variants.back()->layout().bytes();
    return slot.variants.back().get();
}

void Endpoint::own(Time now, Slot& slot, Op& op, Block memory) {
    op.own(std::move(memory));
    for (Rank rank = 0; rank < peers_.size(); ++rank)
        if (peers_[rank].left(op.seq()) || slot.ballot.against(rank, op.layout().bucket_len))
            op.abstain(rank, now);
}

// Pool memory for an op not reached yet. Means come before contributions, both before history.
Block Endpoint::room(std::size_t floats, wire::Stage stage, const Op& wanting, Time now) {
    if (!memory_.could_hold(floats)) return {};  // nothing that could be given up would help
    for (;;) {
        if (Block block = memory_.take_pool(floats)) return block;
        const auto history = std::find_if(slots_.begin(), slots_.end(), [](const auto& entry) {
            const auto& ops = entry.second.variants;
            return std::any_of(ops.begin(), ops.end(), [](const auto& op) { return op->is_history(); });
        });
        if (history != slots_.end()) {
            forget(history->second, [](const Op& op) { return op.is_history(); });
            ++counters_.dropped_history;
            continue;
        }
        if (stage == wire::Stage::kScatter) return {};
        Op* victim = nullptr;
        for (auto& [seq, slot] : slots_)
            for (auto& op : slot.variants)
                if (op.get() != &wanting && !op->entered() && op->owns() && !op->closed()) victim = op.get();
        if (!victim) return {};
        victim->forfeit(now);
        ++counters_.forfeited_shards;
        mark_all_ready();
    }
}

void Endpoint::cast_vote(Time now, Slot& slot, Rank rank, std::uint32_t bucket_len) {
    if (!slot.ballot.vote(rank, bucket_len)) return;
    for (auto& op : slot.variants) {
        if (op->layout().bucket_len != bucket_len) {
            op->abstain(rank, now);  // it will never deliver to this variant
            mark_all_ready();
        }
        if (op->entered() && !op->finished() &&
            slot.ballot.judge(op->layout().bucket_len, false) == Ballot::Verdict::kRefused)
            finish(now, slot, *op, Status::kLengthMismatch);
        else
            settle(now, slot, *op);
    }
}

void Endpoint::settle(Time now, Slot& slot, Op& op) {
    if (op.complete()) finish(now, slot, op, Status::kComplete);
}

void Endpoint::finish(Time now, Slot& slot, Op& op, Status status) {
    OpReport report = op.finish(now, status, settings_.record_fates);
    if (status == Status::kLengthMismatch) {
        report.peer_lengths = slot.ballot.lengths();
        report.peer_voted = slot.ballot.voted();
    }
    reports_.push_back(std::move(report));
    --in_flight_;
    mark_all_ready();
}

bool Endpoint::retired(Seq seq, const Op& op) const {
    if (seq >= next_seq_)
        return closing_;  // who has heard our goodbye waits for nothing of ours from here on
    if (!op.finished() && op.entered()) return false;
    if (!op.closed()) return false;
    for (Rank rank = 0; rank < peers_.size(); ++rank)
        if (rank != settings_.shape.self && !peers_[rank].left(seq) && !op.served(rank)) return false;
    return true;
}

// A peer is in the op and has not been sent all of its mean: not history yet, it only lacks credit.
bool Endpoint::awaited(Seq seq, const Op& op) const {
    for (Rank rank = 0; rank < peers_.size(); ++rank)
        if (rank != settings_.shape.self && peers_[rank].entered > seq && !op.served(rank)) return true;
    return false;
}

// Forget what nobody needs. What a late peer still needs moves to the pool as history, at most W ops of it.
void Endpoint::retire() {
    for (auto at = slots_.begin(); at != slots_.end() && at->first < next_seq_;) {
        const Seq seq = at->first;
        auto& ops = at->second.variants;
        forget(at->second, [&](const Op& op) { return retired(seq, op); });
        forget(at->second, [&](Op& op) {
            if (op.entered() && !op.finished()) return false;
            bool drop = next_seq_ - seq > settings_.window_ops;
            if (!drop && op.finished() && next_seq_ - seq > 2 && !op.compacted()) {
                Block smaller = memory_.take_pool(op.compact_floats());
                drop = !smaller && !awaited(seq, op);
                if (smaller) op.compact(std::move(smaller));
            }
            counters_.dropped_history += drop;
            return drop;
        });
        at = ops.empty() ? slots_.erase(at) : std::next(at);
    }
}

// ---- progress of the group (rule 3) -----------------------------------------------------------------------

void Endpoint::note_entered(Time now, Rank rank, Seq entered) {
    Peer& peer = peers_[rank];
    if (entered <= peer.entered) return;
    peer.entered = entered;
    mark_ready(rank);
    if (in_flight_ == 0) return;  // the next submit() will see it
    if (entered < next_seq_ || entered - next_seq_ <= settings_.window_ops) return;
    if (behind_ops() > settings_.window_ops) jump(now);
}

// The op that at least half of the other ranks have reached: from four ranks on, one alone cannot drag us along.
Seq Endpoint::group_seq() const {
    if (settings_.shape.ranks == 1) return next_seq_;
    const std::size_t majority = settings_.shape.ranks / 2u;
    std::vector<Seq> entered;
    for (Rank rank = 0; rank < peers_.size(); ++rank)
        if (rank != settings_.shape.self) entered.push_back(peers_[rank].entered);
    std::nth_element(entered.begin(), entered.begin() + static_cast<std::ptrdiff_t>(majority - 1),
                     entered.end(), std::greater<>());
    return entered[majority - 1];
}

Seq Endpoint::behind_ops() const {
    const Seq group = group_seq();
    return group > next_seq_ ? group - next_seq_ : 0;
}

// Too far behind: what was in flight ends, seq becomes the group's, and this rank contributes nothing until its
// state has been copied from a peer, because its gradients come from old parameters.
void Endpoint::jump(Time now) {
    const Seq group = group_seq();
    for (auto at = slots_.begin(); at != slots_.end() && at->first < group; at = slots_.erase(at))
        for (auto& op : at->second.variants)
            if (op->entered() && !op->finished()) {
                finish(now, at->second, *op, Status::kBehind);
                reports_.back().behind_ops = group - at->first;
            }
    next_seq_ = group;
    contributing_ = false;
}

// ---- time -------------------------------------------------------------------------------------------------

Time Endpoint::next_timer() const {
    Time next = next_probe_;
    for (const auto& [seq, slot] : slots_)
        for (const auto& op : slot.variants)
            next = std::min({next, op->close_at(terms_.bounds), op->deadline()});
    return next;
}

void Endpoint::advance(Time now) {
    for (auto& [seq, slot] : slots_)
        for (auto& op : slot.variants) {
            if (op->close_at(terms_.bounds) <= now) {
                op->close(now);
                mark_all_ready();
                settle(now, slot, *op);
            }
            if (op->deadline() <= now) {
                const auto verdict = slot.ballot.judge(op->layout().bucket_len, true);
                const bool refused = verdict == Ballot::Verdict::kRefused;
                finish(now, slot, *op, refused ? Status::kLengthMismatch : Status::kDeadline);
            }
        }
    if (now < next_probe_) return;
    next_probe_ = kNever;
    for (Rank rank = 0; rank < peers_.size(); ++rank) {
        Peer& peer = peers_[rank];
        if (peer.probe_at <= now) {
            peer.probe_at = kNever;  // armed again if it is still blocked after this one
            peer.probe_due = true;
            peer.goodbye_due = closing_ && !peer.gone && !peer.goodbye_heard;
            mark_ready(rank);
        }
        next_probe_ = std::min(next_probe_, peer.probe_at);
    }
}

}  // namespace tailcut
