// What an endpoint sends, and to whom next.
#include <algorithm>

#include "protocol/endpoint.hpp"

namespace tailcut {
namespace {

constexpr std::size_t kBurstBytes = 60 * 1024;  // in a row to one peer: what one segmented send can take

}  // namespace

void Endpoint::mark_ready(Rank rank) {
    if (rank == settings_.shape.self || peers_[rank].ready) return;
    peers_[rank].ready = true;
    ready_.push_back(rank);
}

// From the next rank round, so that at any moment the ranks send to different receivers.
void Endpoint::mark_all_ready() {
    for (std::size_t step = 1; step < peers_.size(); ++step)
        mark_ready(static_cast<Rank>((settings_.shape.self + step) % peers_.size()));
}

bool Endpoint::transmit(Time now, Outgoing& out) {
    while (!ready_.empty()) {
        const Rank rank = ready_.front();
        if (next_for(now, rank, out)) {
            ++counters_.sent_packets;
            counters_.sent_bytes += wire::kHeaderBytes + out.payload.size();
            burst_bytes_ += out.payload.size();
            if (burst_bytes_ >= kBurstBytes) {
                ready_.pop_front();
                ready_.push_back(rank);
                burst_bytes_ = 0;
            }
            return true;
        }
        ready_.pop_front();
        peers_[rank].ready = false;
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
        if (peer.left(seq) || (closing_ && seq >= next_seq_)) return false;
        bool over = seq < next_seq_;
        for (auto& op : at->second.variants) {
            over &= op->served(rank) && op->closed() && (op->finished() || !op->entered());
            if (!op->pending(rank)) continue;
            const auto shard_bytes = static_cast<std::uint64_t>(op->layout().shard_stride()) * sizeof(float);
            const std::uint64_t payload_bytes = peer.settings.limits.payload_bytes;
            const auto cost =
                static_cast<std::uint32_t>(std::min(payload_bytes, shard_bytes) + wire::kHeaderBytes) +
                kDatagramOverheadBytes;
            if (!has_room_for(peer, seq) || !peer.has_credit(cost)) {
                ask_later(now, peer);
                return false;
            }
            if (!op->next_packet(now, rank, out)) continue;
            out.header.group_tag = settings_.group_tag;
            out.header.source = settings_.shape.self;
            out.header.stamp_us = peer.next_stamp(now);
            const auto bytes = static_cast<std::uint32_t>(wire::kHeaderBytes + out.payload.size());
            peer.sent(out.header.stamp_us, bytes + kDatagramOverheadBytes);
            op->count_sent(bytes);
            if (op->entered()) peer.told_entered = std::max(peer.told_entered, seq + 1);
            return true;
        }
        if (over && peer.served_below == seq) peer.served_below = seq + 1;
    }
    return false;
}

void Endpoint::ask_later(Time now, Peer& peer) {
    peer.arm_probe(now);
    next_probe_ = std::min(next_probe_, peer.probe_at);
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

void Endpoint::say(Time now, Rank rank, wire::Type type, bool reply_wanted, Outgoing& out) {
    Peer& peer = peers_[rank];
    out = {};
    out.peer = rank;
    out.header.type = type;
    out.header.flags = (reply_wanted ? wire::kReplyWanted : 0) | (peer.gone ? wire::kGoodbyeKnown : 0);
    out.header.group_tag = settings_.group_tag;
    out.header.source = settings_.shape.self;
    out.header.seq = type == wire::Type::kGoodbye ? goodbye_seq_ : next_seq_;
    out.header.echo_us = peer.report_latest();
    out.header.stamp_us = peer.next_stamp(now);
    peer.told_entered = next_seq_;
    ++counters_.feedback_packets;
    counters_.probe_packets += reply_wanted;
}

void Endpoint::retract(const Outgoing& out) {
    Peer& peer = peers_[out.peer];
    --counters_.sent_packets;
    counters_.sent_bytes -= wire::kHeaderBytes + out.payload.size();
    if (out.header.type != wire::Type::kData) {
        const bool reply_wanted = out.header.flags & wire::kReplyWanted;
        --counters_.feedback_packets;
        counters_.probe_packets -= reply_wanted;
        peer.feedback_due = true;
        peer.probe_due |= reply_wanted;
        peer.goodbye_due |= out.header.type == wire::Type::kGoodbye;
    } else {
        peer.unsent();
        const auto slot = slots_.find(out.header.seq);
        for (auto& op : slot->second.variants)
            if (op->layout().bucket_len == out.header.bucket_len) {
                op->retract(out);
                op->uncount_sent(wire::kHeaderBytes + out.payload.size());
            }
        peer.served_below = std::min(peer.served_below, out.header.seq);
    }
    mark_ready(out.peer);
}

}  // namespace tailcut
