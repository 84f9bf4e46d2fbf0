// Ops from entry to retirement, and what comes from the network. Sending is in transmit.cpp.
#include "protocol/endpoint.hpp"

#include <algorithm>
#include <limits>

namespace tailcut {
namespace {

constexpr std::size_t kMaxVariants = 3;  // lengths told apart in one op; more is noise or an attack

}  // namespace

Endpoint::Endpoint(const Settings& settings, const std::vector<PeerSettings>& peers)
    : settings_(settings),
      memory_(settings.pool_bytes),
      peers_(peers.begin(), peers.end()),
      recent_bytes_(2 * std::size_t{settings.window_ops}),
      bounds_(settings.bounds),
      next_seq_(settings.first_seq) {
    for (Peer& peer : peers_) peer.entered = peer.told_entered = peer.served_below = settings.first_seq;
}

// ---- the local rank ---------------------------------------------------------------------------------------

void Endpoint::submit(Time now, Ticket ticket, std::span<float> bucket, const Bounds& bounds) {
    bounds_ = bounds;
    OpReport refused;
    refused.ticket = ticket;
    refused.seq = next_seq_;
    if (closing_ || next_seq_ == std::numeric_limits<Seq>::max()) {  // rule 12: never wrap
        refused.status = closing_ ? Status::kClosed : Status::kSeqExhausted;
        reports_.push_back(std::move(refused));
        return;
    }
    if (const Seq group = group_seq(); group > next_seq_ && group - next_seq_ > settings_.window_ops) {
        refused.status = Status::kBehind;
        refused.behind_ops = group - next_seq_;
        refused.bucket_len = static_cast<std::uint32_t>(bucket.size());
        refused.entered_at = refused.finished_at = now;
        refused.contributed = false;
        std::fill(bucket.begin(), bucket.end(), 0.0f);
        jump(now);
        reports_.push_back(std::move(refused));
        return;
    }
    const Seq seq = next_seq_++;
    Slot& slot = slot_of(seq);
    Op* op = variant(seq, slot, static_cast<std::uint32_t>(bucket.size()), true);
    if (!op->owns()) own(now, slot, *op, memory_.take(OwnedShard::floats(op->layout())));
    ++in_flight_;
    op->enter(now, ticket, bucket, bounds, contributing_);
    for (Rank rank = 0; rank < peers_.size(); ++rank)
        if (peers_[rank].gone && seq >= peers_[rank].gone_seq) op->forsake(rank);
    cast_vote(now, slot, settings_.shape.self, op->layout().bucket_len);
    settle(now, slot, *op);
    mark_all_ready();
    retire();
}

void Endpoint::abort(Time now) {
    for (auto& [seq, slot] : slots_)
        for (auto& op : slot.variants)
            if (op->entered() && !op->finished()) finish(now, slot, *op, Status::kClosed);
}

void Endpoint::say_goodbye() {
    closing_ = true;
    goodbye_seq_ = next_seq_;
    for (Peer& peer : peers_) peer.goodbye_due = true;
    mark_all_ready();
}

void Endpoint::leave() {
    say_goodbye();
    for (const auto& [seq, slot] : slots_)
        for (const auto& op : slot.variants)
            if (!retired(seq, *op)) goodbye_seq_ = std::min(goodbye_seq_, seq);
}

bool Endpoint::drained() const {
    for (Rank rank = 0; rank < peers_.size(); ++rank)
        if (rank != settings_.shape.self && !peers_[rank].gone) return false;
    for (const auto& [seq, slot] : slots_)
        for (const auto& op : slot.variants)
            if (!retired(seq, *op)) return false;
    return ready_.empty();
}

// ---- from the network -------------------------------------------------------------------------------------

void Endpoint::receive(Time now, std::span<const std::byte> datagram) {
    ++counters_.received_packets;
    counters_.received_bytes += datagram.size();
    const wire::Parsed parsed = wire::parse(datagram);
    const wire::Header& header = parsed.header;
    if (!parsed.ok) return reject(parsed.reason);
    if (header.group_tag != settings_.group_tag) return reject(wire::Reject::kGroup);
    if (header.source >= peers_.size() || header.source == settings_.shape.self)
        return reject(wire::Reject::kSource);

    Peer& peer = peers_[header.source];
    peer.heard(header.stamp_us);
    switch (header.type) {
        case wire::Type::kFeedback:
            return on_feedback(now, header);
        case wire::Type::kGoodbye:
            return on_goodbye(now, header);
        case wire::Type::kData:
            const auto cost = static_cast<std::uint32_t>(datagram.size()) + kDatagramOverheadBytes;
            if (peer.received(cost, settings_.window_bytes)) {
                peer.feedback_due = true;
                mark_ready(header.source);
            }
            return on_data(now, header, datagram.subspan(wire::kHeaderBytes));
    }
}

void Endpoint::on_feedback(Time now, const wire::Header& header) {
    Peer& peer = peers_[header.source];
    peer.settle(now, header.echo_us);
    peer.goodbye_heard |= (header.flags & wire::kGoodbyeKnown) != 0;
    if (closing_ && !peer.gone && !peer.goodbye_heard && peer.arm_probe(now))  // settle() has disarmed it
        next_probe_ = std::min(next_probe_, peer.probe_at);
    peer.feedback_due |= (header.flags & wire::kReplyWanted) != 0;
    note_entered(now, header.source, header.seq);
    mark_ready(header.source);
}

void Endpoint::on_goodbye(Time now, const wire::Header& header) {
    Peer& peer = peers_[header.source];
    peer.settle(now, header.echo_us);
    peer.feedback_due |= (header.flags & wire::kReplyWanted) != 0;
    mark_ready(header.source);
    if (peer.gone && header.seq >= peer.gone_seq) return;
    note_entered(now, header.source, header.seq);
    peer.gone = true;
    peer.gone_seq = header.seq;
    for (auto at = slots_.lower_bound(header.seq); at != slots_.end(); ++at)
        for (auto& op : at->second.variants) {
            op->abstain(header.source, now);
            if (op->entered() && !op->finished()) op->forsake(header.source);
            settle(now, at->second, *op);
        }
    mark_all_ready();
}

void Endpoint::on_data(Time now, const wire::Header& header, std::span<const std::byte> payload) {
    if (header.seq == std::numeric_limits<Seq>::max()) return reject(wire::Reject::kSeq);
    if (const auto reason = check_shape(header, payload.size())) return reject(*reason);
    const bool source_entered = header.entry_us != wire::kNotEntered;
    if (source_entered) note_entered(now, header.source, header.seq + 1);  // may jump

    const auto found = slots_.find(header.seq);
    const auto forgotten = [&](const Slot& slot) {
        return std::find(slot.forgotten.begin(), slot.forgotten.end(), header.bucket_len) !=
               slot.forgotten.end();
    };
    // Over for us, and forgotten. Never begun anew: the mean would be another than the one already sent.
    if (header.seq < next_seq_ && (found == slots_.end() || forgotten(found->second))) {
        if (header.stage() == wire::Stage::kGather) {
            ++counters_.late_gather_packets;
            return;
        }
        peers_[header.source].feedback_due = true;  // tells the source how far the group is
        mark_ready(header.source);
        return reject(wire::Reject::kLate);
    }
    if (header.seq >= next_seq_ && header.seq - next_seq_ >= settings_.window_ops)
        return reject(wire::Reject::kSeq);

    Slot& slot = found != slots_.end() ? found->second : slot_of(header.seq);
    Op* op = variant(header.seq, slot, header.bucket_len, false);
    if (!op) return reject(wire::Reject::kLength);
    if (source_entered) cast_vote(now, slot, header.source, header.bucket_len);
    const std::uint32_t final_before = op->own_final();
    if (const auto reason = deliver(now, slot, *op, header, payload)) return reject(*reason);
    op->count_received(wire::kHeaderBytes + payload.size());
    if (op->own_final() != final_before) mark_all_ready();
    settle(now, slot, *op);
}

std::optional<wire::Reject> Endpoint::deliver(Time now, Slot& slot, Op& op, const wire::Header& header,
                                              std::span<const std::byte> payload) {
    if (header.stage() == wire::Stage::kScatter) {
        if (!op.owns()) {
            Block block = room(OwnedShard::floats(op.layout()), wire::Stage::kScatter, op, now);
            if (!block) return wire::Reject::kPool;
            own(now, slot, op, std::move(block));
        }
        const Duration age = std::min(Duration{header.entry_us} * kMicrosecond, bounds_.deadline);
        return op.scatter(now, header, payload, now - age);
    }
    if (op.finished()) {  // rule 9: late is not lost, but it does not touch a bucket that was handed back
        ++counters_.late_gather_packets;
        return std::nullopt;
    }
    if (!op.holds()) {
        Block block = room(op.layout().bucket_len, wire::Stage::kGather, op, now);
        if (!block) return wire::Reject::kPool;
        op.hold(std::move(block));
    }
    return op.gather(header, payload);
}

// docs/wire-format.md W7 and W8.
std::optional<wire::Reject> Endpoint::check_shape(const wire::Header& header,
                                                  std::size_t payload_bytes) const {
    const Shape& shape = settings_.shape;
    const bool gather = header.stage() == wire::Stage::kGather;
    if (header.shard >= shape.ranks) return wire::Reject::kShape;
    if (shape.owner(header.shard, header.seq) != (gather ? header.source : shape.self))
        return wire::Reject::kOwner;
    if (!gather && header.entry_us == wire::kNotEntered) return wire::Reject::kShape;
    if (payload_bytes > wire::stated_payload_bytes(header)) return wire::Reject::kShape;
    if ((header.flags & wire::kOver) && (gather || header.count != 0)) return wire::Reject::kShape;
    if (header.count == 0)
        return header.empty() && header.first == 0 ? std::nullopt : std::optional(wire::Reject::kShape);
    if (header.empty() && !gather) return wire::Reject::kShape;

    const std::uint32_t length = Layout{header.bucket_len, shape.ranks}.length(header.shard);
    const std::uint64_t end = std::uint64_t{header.first} + header.count;
    if (header.first % kGranule != 0 || end > length) return wire::Reject::kShape;
    if (header.count % kGranule != 0 && end != length) return wire::Reject::kShape;
    return std::nullopt;
}

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
    slot.variants.push_back(std::make_unique<Op>(settings_.shape, seq, bucket_len));
    if (own_length || slot.variants.size() == 1)
        recent_bytes_[seq % recent_bytes_.size()] = slot.variants.back()->layout().bytes();
    return slot.variants.back().get();
}

void Endpoint::own(Time now, Slot& slot, Op& op, Block memory) {
    op.own(std::move(memory));
    for (Rank rank = 0; rank < peers_.size(); ++rank)
        if ((peers_[rank].gone && op.seq() >= peers_[rank].gone_seq) ||
            slot.ballot.against(rank, op.layout().bucket_len))
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
    for (Rank rank = 0; rank < peers_.size(); ++rank) {
        const Peer& peer = peers_[rank];
        if (rank != settings_.shape.self && !(peer.gone && seq >= peer.gone_seq) && !op.served(rank))
            return false;
    }
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
                Block smaller = memory_.take_pool(op.layout().shard_stride());
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
    if (const Seq group = group_seq(); group > next_seq_ && group - next_seq_ > settings_.window_ops)
        jump(now);
}

// The op that at least half of the other ranks have reached: from four ranks on, one alone cannot drag us along.
Seq Endpoint::group_seq() const {
    if (settings_.shape.ranks == 1) return next_seq_;
    std::size_t ahead = 0;
    for (Rank rank = 0; rank < peers_.size(); ++rank)
        ahead += rank != settings_.shape.self && peers_[rank].entered > next_seq_;
    const std::size_t majority = settings_.shape.ranks / 2u;
    if (ahead < majority) return next_seq_;
    std::vector<Seq> entered;
    for (Rank rank = 0; rank < peers_.size(); ++rank)
        if (rank != settings_.shape.self) entered.push_back(peers_[rank].entered);
    std::nth_element(entered.begin(), entered.begin() + static_cast<std::ptrdiff_t>(majority - 1),
                     entered.end(), std::greater<>());
    return entered[majority - 1];
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
        for (const auto& op : slot.variants) next = std::min({next, op->close_at(bounds_), op->deadline()});
    return next;
}

void Endpoint::advance(Time now) {
    for (auto& [seq, slot] : slots_)
        for (auto& op : slot.variants) {
            if (op->close_at(bounds_) <= now) {
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
