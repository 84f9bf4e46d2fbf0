// The life of an endpoint's ops: memory, votes, ends, retirement; the group's progress; time.
#include <algorithm>
#include <functional>
#include <utility>

#include "protocol/endpoint.hpp"

namespace tailcut {
namespace {

constexpr std::size_t kMaxVariants = 3;  // lengths told apart in one op; more is noise or an attack
constexpr int kSilentOps = 3;            // that ended without a word from a rank: it is not waited for
constexpr std::size_t kMostCuts = 64;    // stages whose late packets are still counted

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
    slot.variants.push_back(std::make_unique<Op>(context_, seq, bucket_len, terms_.gather));
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
            ++counters_.evicted_means;
            continue;
        }
        if (stage == wire::Stage::kScatter) return {};
        Op* victim = nullptr;
        for (auto& [seq, slot] : slots_)
            for (auto& op : slot.variants)
                if (op.get() != &wanting && !op->entered() && op->owns() && !op->closed()) victim = op.get();
        if (!victim) return {};
        victim->forfeit(now);
        take_sums(*victim);
        ++counters_.evicted_shards;
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
            finish(now, slot, *op, Status::kLengthMismatch, Ending::kDeadline);
        else
            settle(now, slot, *op);
    }
}

void Endpoint::settle(Time now, Slot& slot, Op& op) {
    take_sums(op);
    if (op.complete()) finish(now, slot, op, Status::kComplete, Ending::kAll);
}

void Endpoint::take_sums(Op& op) {
    if (op.summable()) sums_.push_back(op.sum(bounds_of(op)));
}

bool Endpoint::will_sum(Seq seq) const {
    if (seq >= next_seq_) return true;
    const auto slot = slots_.find(seq);
    return slot != slots_.end() &&
           std::any_of(slot->second.variants.begin(), slot->second.variants.end(),
                       [](const auto& op) { return op->entered() && !op->finished(); });
}

void Endpoint::close_scatter(Time now, Seq seq) {
    const auto slot = slots_.find(seq);
    if (slot == slots_.end()) return;
    for (auto& op : slot->second.variants)
        if (op->owns()) {
            op->close(now, Ending::kBound, terms_.skip_above);
            settle(now, slot->second, *op);
        }
}

bool Endpoint::overtaken(Seq seq) const {
    const auto slot = slots_.find(seq);
    return seq >= next_seq_ && slot != slots_.end() &&
           std::any_of(slot->second.variants.begin(), slot->second.variants.end(),
                       [](const auto& op) { return op->owns() && op->closed(); });
}

void Endpoint::conclude(Time now, Seq seq, std::uint32_t bucket_len, std::span<const float> means,
                        const GranuleSet& held, std::span<const std::uint8_t> planes, bool non_finite) {
    const auto slot = slots_.find(seq);
    if (slot == slots_.end()) return;
    for (auto& op : slot->second.variants)
        if (op->layout().bucket_len == bucket_len) {
            op->conclude(means, held, planes, non_finite);
            settle(now, slot->second, *op);
        }
    mark_all_ready();
}

void Endpoint::skip_to(Seq seq) {
    next_seq_ = std::max(next_seq_, seq);
    mark_all_ready();
    retire();
}

void Endpoint::finish(Time now, Slot& slot, Op& op, Status status, Ending ending) {
    op.close(now, ending, terms_.skip_above);  // the own contribution leaves with the bucket
    take_sums(op);
    const bool awaited =
        settings_.resend && (group_path_.awaits(op.seq()) ||
                             std::any_of(peers_.begin(), peers_.end(),
                                         [&](const Peer& peer) { return peer.path.awaits(op.seq()); }));
    OpReport report = op.finish(now, status, ending, awaited, settings_.record_fates);
    note_presence(report);
    note_cuts(report, op);
    report.lr_scale = lr_scale_;
    if (status == Status::kLengthMismatch) {
        const Ballot& ballot = slot.ballot;
        for (Rank rank = 0; rank < peers_.size(); ++rank)
            report.stated_lengths.push_back(ballot.voted()[rank] ? std::optional(ballot.lengths()[rank])
                                                                 : std::nullopt);
    }
    reports_.push_back(std::move(report));
    --in_flight_;
    mark_all_ready();
}

// Who is silent, and what was sent to everybody and lost since the last report.
void Endpoint::note_presence(const OpReport& report) {
    for (Rank rank = 0; rank < peers_.size(); ++rank) {
        Peer& peer = peers_[rank];
        if (rank == settings_.shape.self || report.status == Status::kComplete) continue;
        if (peer.heard_at >= report.entered_at || ++peer.quiet_ops != kSilentOps) continue;
        context_.silent[rank] = true;
        ++context_.silent_count;
    }
}

void Endpoint::note_cuts(OpReport& report, const Op& op) {
    report.late = std::exchange(late_, {});
    for (const Cut& cut : cuts_)
        if (cut.seq + 1 == report.seq) report.late_coords += cut.late_coords;
    for (Rank rank = 0; rank < peers_.size(); ++rank) {
        Peer& peer = peers_[rank];
        LinkReport& link = report.links[rank];
        const auto since = [](std::uint64_t now, std::uint64_t& before) {
            return static_cast<std::uint32_t>(now - std::min(now, std::exchange(before, now)));
        };
        std::uint64_t sent = peer.path.sent_packets(), lost = peer.path.lost_packets();
        if (const int member = context_.audience.index(rank); member >= 0) {
            sent += group_path_.settled_packets(static_cast<std::size_t>(member));
            lost += group_path_.lost_packets(static_cast<std::size_t>(member));
        }
        const auto both = [&](auto count) {
            return (peer.arrivals.*count)() + (peer.multicast_arrivals.*count)();
        };
        link.sent_packets = since(sent, peer.reported_sent);
        link.sent_lost_packets = since(lost, peer.reported_lost);
        link.received_packets = since(both(&Arrivals::came), peer.reported_came);
        link.received_lost_packets = since(both(&Arrivals::missing), peer.reported_missing);
    }
    const auto note_cut = [&](wire::Stage stage, const StageReport& ended, const auto& missing_from) {
        if (ended.ended_by == Ending::kAll || !ended.began) return;
        Cut cut{report.seq, stage, report.bucket_len, report.entered_at + *ended.began, 0, {}};
        for (Rank rank = 0; rank < peers_.size(); ++rank) {
            const std::uint32_t missing = missing_from(report.links[rank]);
            if (missing == 0 || report.links[rank].silent) continue;
            cut.missing += missing;
            cut.came.emplace_back(rank, op.came(stage, rank));
        }
        if (cut.missing > 0) cuts_.push_back(std::move(cut));
    };
    note_cut(wire::Stage::kScatter, report.scatter,
             [](const LinkReport& link) { return link.abstained ? 0 : link.scatter.missing; });
    note_cut(wire::Stage::kGather, report.gather, [](const LinkReport& link) { return link.gather.missing; });
    while (cuts_.size() > kMostCuts) cuts_.pop_front();
}

// A packet of a stage that is over: when all that was missing has come, it is known how long the stage would have taken.
void Endpoint::note_late(Time now, const wire::Header& header, std::size_t payload_bytes) {
    ++counters_.traffic.late_packets;
    const auto cut = std::find_if(cuts_.begin(), cuts_.end(), [&](const Cut& c) {
        return c.seq == header.seq && c.stage == header.stage() && c.bucket_len == header.bucket_len;
    });
    const bool gather = header.stage() == wire::Stage::kGather;
    if (cut == cuts_.end() || cut->missing <= 0 || (header.empty() && !gather)) return;
    for (auto& [rank, came] : cut->came) {
        if (rank != header.source) continue;
        const Layout layout{header.bucket_len, settings_.shape.ranks};
        const std::uint32_t first = header.first / kGranule;
        const std::uint32_t last = header.count == 0
                                       ? layout.granules(header.shard)
                                       : first + wire::delivered_granules(header, payload_bytes);
        for (std::uint32_t g = first, end; g < last; g = end) {  // what has come twice counts once
            end = came.run_end(g, last);
            if (came.test(g)) continue;
            const std::uint32_t coords = layout.coords(header.shard, g, end);
            cut->missing -= coords;
            if (gather && !header.empty()) cut->late_coords += coords;
        }
        came.set(first, last);
    }
    if (cut->missing > 0) return;
    late_.push_back({cut->seq, cut->stage, cut->bucket_len, now - cut->from});
    cut->came = {};
}

bool Endpoint::retired(Seq seq, const Op& op) const {
    if (seq >= next_seq_)
        return closing_;  // who has heard our goodbye waits for nothing of ours from here on
    if (!op.finished() && op.entered()) return false;
    if (!op.closed()) return false;
    if (settings_.resend && group_path_.awaits(seq)) return false;
    for (Rank rank = 0; rank < peers_.size(); ++rank) {
        const Peer& peer = peers_[rank];
        if (rank == settings_.shape.self || peer.left(seq)) continue;
        if (!op.served(rank)) return false;
        if (settings_.resend && !peer.gone && peer.path.awaits(seq))
            return false;  // it may have to be sent again
    }
    return true;
}

// A peer is in the op and has not been sent all of its mean: not history yet, it only lacks credit.
bool Endpoint::awaited(Seq seq, const Op& op) const {
    for (Rank rank = 0; rank < peers_.size(); ++rank)
        if (rank != settings_.shape.self && peers_[rank].entered > seq && !op.served(rank)) return true;
    return false;
}

// Rule 9: some of the mean for a peer that has ended the op. Half of the pool is for those that have not.
bool Endpoint::owes_late(const Op& op) const {
    if (2 * memory_.pool_used_bytes() > settings_.pool_bytes) return false;
    for (Rank rank = 0; rank < peers_.size(); ++rank)
        if (rank != settings_.shape.self && takes_late(rank) && op.late(rank)) return true;
    return false;
}

// Forget what nobody needs. What a late peer still needs moves to the pool as history, at most W ops of it.
void Endpoint::retire() {
    for (auto at = slots_.begin(); at != slots_.end() && at->first < next_seq_;) {
        const Seq seq = at->first;
        auto& ops = at->second.variants;
        forget(at->second, [&](const Op& op) { return retired(seq, op) && !owes_late(op); });
        forget(at->second, [&](Op& op) {
            if (op.entered() && !op.finished()) return false;
            bool drop = next_seq_ - seq > settings_.window_ops;
            if (!drop && op.finished() && next_seq_ - seq > 2 && !op.compacted()) {
                Block smaller = memory_.take_pool(op.compact_floats());
                drop = !smaller && !awaited(seq, op);
                if (smaller) op.compact(std::move(smaller));
            }
            counters_.evicted_means += drop && !retired(seq, op);
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
    if (context_.audience.index(rank) >= 0) mark_ready(everybody());
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
                finish(now, at->second, *op, Status::kBehind, Ending::kDeadline);
                reports_.back().behind_ops = group - at->first;
            }
    next_seq_ = group;
    contributing_ = false;
}

// ---- time -------------------------------------------------------------------------------------------------

// Of an op that the local rank has not entered: those of its latest op, longer for a longer bucket.
Bounds Endpoint::bounds_of(const Op& op) const {
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

Time Endpoint::next_timer() const {
    Time next = next_probe_;
    if (!wakes_.empty()) next = std::min(next, wakes_.top().first);
    for (const auto& [seq, slot] : slots_)
        for (const auto& op : slot.variants)
            next = std::min({next, op->close_at(bounds_of(*op)).at, op->end_at().at});
    return next;
}

void Endpoint::advance(Time now) {
    for (std::size_t silent = context_.silent_count;;) {
        for (auto& [seq, slot] : slots_)
            for (auto& op : slot.variants) {
                if (const auto close = op->close_at(bounds_of(*op)); close.at <= now) {
                    op->close(now, close.ending, terms_.skip_above);
                    mark_all_ready();
                    settle(now, slot, *op);
                }
                if (const auto end = op->end_at(); end.at <= now) {
                    const auto verdict = slot.ballot.judge(op->layout().bucket_len, true);
                    const bool refused = verdict == Ballot::Verdict::kRefused;
                    finish(now, slot, *op, refused ? Status::kLengthMismatch : Status::kPartial, end.ending);
                }
            }
        // Who was found silent by it is not waited for: more may be due.
        if (std::exchange(silent, context_.silent_count) >= context_.silent_count) break;
    }
    for (; !wakes_.empty() && wakes_.top().first <= now; wakes_.pop()) {
        const auto [at, rank] = wakes_.top();
        if (wake_at(rank) != at) continue;
        wake_at(rank) = kNever;
        mark_ready(rank);
    }
    if (now < next_probe_) return;
    next_probe_ = kNever;
    if (group_path_.probe.at() <= now) ask_members(now);
    next_probe_ = group_path_.probe.at();
    for (Rank rank = 0; rank < peers_.size(); ++rank) {
        Peer& peer = peers_[rank];
        if (peer.path.probe.at() <= now) {
            peer.path.probe.rang();
            peer.probe_due = true;
            peer.goodbye_due = closing_ && !peer.gone && !peer.goodbye_heard;
            mark_ready(rank);
        }
        next_probe_ = std::min(next_probe_, peer.path.probe.at());
    }
}

}  // namespace tailcut
