// What an endpoint sends, and to whom next.
#include <algorithm>
#include <memory>

#include "protocol/endpoint.hpp"

namespace tailcut {
namespace {

constexpr std::size_t kBurstBytes = 60 * 1024;  // in a row to one peer: what one segmented send can take

}  // namespace

void Endpoint::mark_ready(Rank rank) {
    if (rank == settings_.shape.self || is_ready(rank)) return;
    is_ready(rank) = true;
    ready_.push_back(rank);
}

// From the next rank round, so that at any moment the ranks send to different receivers.
void Endpoint::mark_all_ready() {
    for (std::size_t step = 1; step < peers_.size(); ++step)
        mark_ready(static_cast<Rank>((settings_.shape.self + step) % peers_.size()));
    if (group_path_.active().any()) mark_ready(everybody());
}

bool Endpoint::transmit(Time now, Outgoing& out) {
    while (!ready_.empty()) {
        const Rank rank = ready_.front();
        if (rank == everybody() ? next_multicast(now, out) : next_for(now, rank, out)) {
            ++counters_.traffic.sent_packets;
            counters_.traffic.sent_bytes += wire::kHeaderBytes + out.payload.size();
            burst_bytes_ += out.payload.size();
            if (burst_bytes_ >= kBurstBytes) {
                ready_.pop_front();
                ready_.push_back(rank);
                burst_bytes_ = 0;
            }
            return true;
        }
        ready_.pop_front();
        is_ready(rank) = false;
        burst_bytes_ = 0;
    }
    return false;
}

bool Endpoint::next_for(Time now, Rank rank, Outgoing& out) {
    Peer& peer = peers_[rank];
    if (peer.goodbye_due) {
        peer.goodbye_due = false;
        say(now, rank, wire::Type::kGoodbye, !peer.gone, out);
        if (!peer.gone) ask_later(now, peer);
        return true;
    }
    if (peer.feedback_due || peer.probe_due) {
        say(now, rank, wire::Type::kFeedback, peer.probe_due, out);
        peer.feedback_due = peer.probe_due = false;
        return true;
    }
    if (peer.multicast_feedback_due || peer.multicast_probe_due) {
        say(now, rank, wire::Type::kFeedback, peer.multicast_probe_due, out, true);
        peer.multicast_feedback_due = peer.multicast_probe_due = false;
        return true;
    }
    if (next_data(now, rank, out)) return true;
    if (peer.told_entered < next_seq_ && !peer.gone) {  // blocked: it may be waiting to hear that we are here
        say(now, rank, wire::Type::kFeedback, false, out);
        return true;
    }
    return false;
}

// The oldest op first, so that one that is nearly done is not delayed by the next.
bool Endpoint::next_data(Time now, Rank rank, Outgoing& out) {
    Peer& peer = peers_[rank];
    for (auto at = slots_.lower_bound(peer.served_below); at != slots_.end(); ++at) {
        const Seq seq = at->first;
        if (peer.left(seq) || (closing_ && seq >= next_seq_)) break;
        bool over = seq < next_seq_;
        for (auto& op : at->second.variants) {
            const bool fresh = op->pending(rank), lost = peer.path.lost().any(seq);
            over &= op->served(rank) && op->closed() && (op->finished() || !op->entered()) && !lost;
            if (!fresh && !lost) continue;
            if (!may_send(now, rank, *op)) return false;
            if (!next_of(now, rank, *op, out)) {
                if (fresh) pass_turn(rank, *op);  // it needs nothing any more
                continue;
            }
            dispatch(now, rank, *op, out);
            pass_turn(rank, *op);
            return true;
        }
        if (over && peer.served_below == seq) peer.served_below = seq + 1;
    }
    peer.path.starved();
    if (next_late(now, rank, out)) return true;
    if (settings_.resend && peer.path.in_flight()) ask_later(now, peer);  // was the last of it lost?
    return false;
}

void Endpoint::dispatch(Time now, Rank rank, Op& op, Outgoing& out) {
    Peer& peer = peers_[rank];
    out.header.group_tag = settings_.group_tag;
    out.header.source = settings_.shape.self;
    out.header.incast = terms_.incast;
    if (out.header.flags & wire::kLastPart && !op.pending(rank)) out.header.flags |= wire::kReplyWanted;
    peer.path.stamp(now, out.header);
    const auto bytes = static_cast<std::uint32_t>(wire::kHeaderBytes + out.payload.size());
    peer.path.sent(out.header, out.parcel, bytes);
    op.count_sent(out);
    counters_.traffic.resent_packets += out.again;
    if (op.entered()) peer.told_entered = std::max(peer.told_entered, op.seq() + 1);
}

// Rule 9: the rest of a mean for a peer that has ended the op. It must not delay an op that is alive, neither here nor in
// the peer's port: it goes when there is nothing else for anybody, and nobody queues on the way. What is lost is not sent
// again.
bool Endpoint::next_late(Time now, Rank rank, Outgoing& out) {
    const Path& path = peers_[rank].path;
    if (!takes_late(rank) || !path.idle()) return false;
    for (auto& [seq, slot] : slots_)
        for (auto& op : slot.variants) {
            if (!op->late(rank)) continue;
            if (!has_leisure() || !may_send(now, rank, *op)) return false;
            op->next_late(now, rank, out);
            if (!path.in_flight()) out.header.flags |= wire::kReplyWanted;  // does anybody queue by now?
            dispatch(now, rank, *op, out);
            return true;
        }
    return false;
}

// Nothing is to be sent that is not late, but to ranks that do not answer.
bool Endpoint::has_leisure() const {
    for (const auto& [seq, slot] : slots_)
        for (const auto& op : slot.variants) {
            if (op->pending(everybody())) return false;
            for (Rank rank = 0; rank < peers_.size(); ++rank)
                if (rank != settings_.shape.self && takes_late(rank) && op->pending(rank)) return false;
        }
    return true;
}

// Whether the peer has room, the path credit, and the pace a packet for it.
bool Endpoint::may_send(Time now, Rank rank, const Op& op) {
    Peer& peer = peers_[rank];
    const std::uint64_t shard_bytes = op.layout().shard_stride() * sizeof(float);
    const std::uint64_t payload_bytes = peer.settings.limits.payload_bytes;
    const auto cost = static_cast<std::uint32_t>(std::min(payload_bytes, shard_bytes) + wire::kHeaderBytes) +
                      kDatagramOverheadBytes;
    if (!has_room_for(peer, op.seq())) {
        ask_later(now, peer);
        return false;
    }
    if (!has_turn(rank, op)) {
        turn_awaited_ = true;
        return false;
    }
    const Time at = peer.path.clear_at(now, cost);
    if (at <= now) return true;
    ask_later(now, peer);
    if (at < peer.wake_at) wakes_.push({peer.wake_at = at, rank});
    return false;
}

// Receivers that want to hear few senders at once: this one sends to the first so many in its order, which starts at
// the next rank: as each sender starts elsewhere, each receiver hears about so many. The least number holds for all.
// With a number for each, one that asks for fewer than the others is left until last, and then hears all at once.
bool Endpoint::has_turn(Rank rank, const Op& op) const {
    if (limiting_peers_ == 0) return true;
    std::size_t before = peers_.size();
    for (Rank other = 0; other < peers_.size(); ++other)
        if (peers_[other].incast != 0 && !context_.silent[other])
            before = std::min<std::size_t>(before, peers_[other].incast);
    if (before == peers_.size()) return true;
    for (std::size_t step = 1; step < peers_.size(); ++step) {
        const auto other = static_cast<Rank>((settings_.shape.self + step) % peers_.size());
        if (other == rank) return true;
        if (!context_.silent[other] && op.pending(other) && --before == 0) return false;
    }
    return true;
}

// Who has been served leaves its place to those who wait for one.
void Endpoint::pass_turn(Rank rank, const Op& op) {
    if (!turn_awaited_ || op.pending(rank)) return;
    turn_awaited_ = false;
    mark_all_ready();
}

// Contributions before means, and of each what is fresh before what was lost.
bool Endpoint::next_of(Time now, Rank rank, Op& op, Outgoing& out) {
    if (op.owes(rank) && op.next_packet(now, rank, out)) return true;
    if (next_lost(now, rank, op, wire::Stage::kScatter, out)) return true;
    if (op.pending(rank) && op.next_packet(now, rank, out)) return true;
    return next_lost(now, rank, op, wire::Stage::kGather, out);
}

bool Endpoint::next_lost(Time now, Rank rank, Op& op, wire::Stage stage, Outgoing& out) {
    LostParcels& lost = peers_[rank].path.lost();
    while (const auto parcel = lost.take(op.seq(), op.layout().bucket_len, stage))
        if (op.repeat(now, rank, *parcel, out)) return true;
    return false;
}

void Endpoint::ask_later(Time now, Peer& peer) {
    peer.path.arm_probe(now);
    next_probe_ = std::min(next_probe_, peer.path.probe.at());
}

// A peer that has not reached the op keeps its packets in its pool. Every sender reckons the room there alike,
// from the sizes of the ops in between, so the pool is not overrun.
bool Endpoint::has_room_for(const Peer& peer, Seq seq) const {
    if (seq < peer.entered) return true;
    if (seq - peer.entered >= settings_.window_ops) return false;
    std::uint64_t needed = 0;
    for (Seq at = peer.entered; at <= seq; ++at) {
        const Layout layout{
            static_cast<std::uint32_t>(recent_bytes_[at % recent_bytes_.size()] / sizeof(float)),
            settings_.shape.ranks};
        needed += (owned_floats(settings_.codec, layout) + layout.bucket_len + 32) * sizeof(float);
    }
    return needed <= peer.settings.pool_bytes;
}

void Endpoint::say(Time now, Rank rank, wire::Type type, bool reply_wanted, Outgoing& out, bool multicast) {
    Peer& peer = peers_[rank];
    out = {};
    out.peer = rank;
    out.header.type = type;
    out.header.flags = (reply_wanted ? wire::kReplyWanted : 0) | (peer.gone ? wire::kGoodbyeKnown : 0) |
                       (multicast ? wire::kMulticast : 0);
    out.header.group_tag = settings_.group_tag;
    out.header.source = settings_.shape.self;
    out.header.seq = type == wire::Type::kGoodbye ? goodbye_seq_ : next_seq_;
    out.header.incast = terms_.incast;
    const LrScale& known = terms_.lr_scale.newer_than(lr_scale_) ? terms_.lr_scale : lr_scale_;
    out.header.lr_scale = known.scale;
    out.header.lr_period = known.period;
    if (multicast)
        group_path_.stamp(now, out.header);
    else
        peer.path.stamp(now, out.header);
    Arrivals::Report report;
    Arrivals& arrivals = multicast ? peer.multicast_arrivals : peer.arrivals;
    if (const std::size_t words = arrivals.report(out.header, report)) {
        const auto missing = std::span(report).last(words);
        const auto keeper =
            std::make_shared<const std::vector<std::uint64_t>>(missing.begin(), missing.end());
        out.payload = std::as_bytes(std::span(*keeper));
        out.keeper = keeper;
    }
    // Senders that take turns bring unequal amounts in any few milliseconds: that is no reason to yield.
    out.header.share = terms_.incast == 0 ? shares_.of(rank) : 0;
    peer.told_entered = next_seq_;
    ++counters_.feedback_packets;
    counters_.feedback_bytes += wire::kHeaderBytes + out.payload.size();
    counters_.probe_packets += reply_wanted;
}

void Endpoint::retract(Time now, const Outgoing& out) {
    --counters_.traffic.sent_packets;
    counters_.traffic.sent_bytes -= wire::kHeaderBytes + out.payload.size();
    if (out.peer == everybody()) return retract_multicast(now, out);
    Peer& peer = peers_[out.peer];
    if (out.header.type != wire::Type::kData) {
        const bool reply_wanted = out.header.flags & wire::kReplyWanted;
        --counters_.feedback_packets;
        counters_.feedback_bytes -= wire::kHeaderBytes + out.payload.size();
        counters_.probe_packets -= reply_wanted;
        (out.header.multicast() ? peer.multicast_feedback_due : peer.feedback_due) = true;
        (out.header.multicast() ? peer.multicast_probe_due : peer.probe_due) |= reply_wanted;
        peer.goodbye_due |= out.header.type == wire::Type::kGoodbye;
    } else {
        peer.path.unsent(now);
        counters_.traffic.resent_packets -= out.again;
        if (out.again) peer.path.lost().add(out.parcel);
        const auto slot = slots_.find(out.header.seq);
        for (auto& op : slot->second.variants)
            if (op->layout().bucket_len == out.header.bucket_len) {
                op->retract(out);
                op->count_sent(out, -1);
            }
        peer.served_below = std::min(peer.served_below, out.header.seq);
    }
    mark_ready(out.peer);
}

}  // namespace tailcut
