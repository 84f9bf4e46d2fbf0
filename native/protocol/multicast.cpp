// An endpoint's means for all that hear them at once: what goes to everybody, what came of it, and who is served apart.
#include <algorithm>

#include "protocol/endpoint.hpp"

namespace tailcut {
namespace {

// For so many ops a member is served by unicast: who was too slow is likely to be again, who was silent may have been busy.
constexpr Seq kSlowOps = 100, kSilentOps = 10;

}  // namespace

// ---- sending ----------------------------------------------------------------------------------------------

// The oldest op first, as next_data().
bool Endpoint::next_multicast(Time now, Outgoing& out) {
    for (auto at = slots_.lower_bound(group_path_.served_below); at != slots_.end(); ++at) {
        const Seq seq = at->first;
        if (closing_ && seq >= next_seq_) break;
        bool over = seq < next_seq_;
        for (auto& op : at->second.variants) {
            over &= op->served(everybody()) && (op->finished() || !op->entered());
            if (!op->pending(everybody())) continue;
            if (!may_multicast(now, *op)) return false;
            const Audience::Set to = op->covered();
            op->next_packet(now, everybody(), out);
            out.header.group_tag = settings_.group_tag;
            out.header.source = settings_.shape.self;
            out.header.incast = terms_.incast;
            if (out.header.flags & wire::kLastPart && !op->pending(everybody()))
                out.header.flags |= wire::kReplyWanted;
            group_path_.stamp(now, out.header);
            const auto bytes = static_cast<std::uint32_t>(wire::kHeaderBytes + out.payload.size());
            group_path_.sent(out.header, out.parcel, bytes, to);
            op->count_sent(out);
            ++counters_.traffic.multicast_packets;
            return true;
        }
        if (over && group_path_.served_below == seq) group_path_.served_below = seq + 1;
    }
    if (settings_.resend && group_path_.in_flight()) {  // was the last of it lost?
        group_path_.arm_probe(now);
        next_probe_ = std::min(next_probe_, group_path_.probe.at());
    }
    return false;
}

// As may_send(). Who accepts how many senders at once is not looked at: all owners multicast to all.
bool Endpoint::may_multicast(Time now, Op& op) {
    const std::uint64_t shard_bytes = op.layout().shard_stride() * sizeof(float);
    const std::uint64_t payload_bytes = context_.limits[everybody()].payload_bytes;
    const auto cost = static_cast<std::uint32_t>(std::min(payload_bytes, shard_bytes) + wire::kHeaderBytes) +
                      kDatagramOverheadBytes;
    group_path_.room_wanted = !most_have_room_for(op);
    const Time at = group_path_.room_wanted ? kNever : group_path_.clear_at(now, cost);
    if (at == kNever) {
        group_path_.arm_probe(now);
        next_probe_ = std::min(next_probe_, group_path_.probe.at());
        return false;
    }
    if (at <= now) return true;
    if (at < group_path_.wake_at) wakes_.push({group_path_.wake_at = at, everybody()});
    return false;
}

// If most have, those that have none are served by unicast in this op, when they have. Room only grows: the others are not
// looked at again.
bool Endpoint::most_have_room_for(Op& op) {
    if (op.seq() < group_path_.room_below) return true;
    const Audience::Set covered = op.covered();
    Audience::Set without;
    for (std::size_t k = 0; k < context_.audience.ranks.size(); ++k)
        without[k] = covered[k] && !has_room_for(peers_[context_.audience.ranks[k]], op.seq());
    if (2 * without.count() > covered.count()) return false;
    for (std::size_t k = 0; without.any() && k < context_.audience.ranks.size(); ++k)
        if (without[k]) {
            op.uncover(context_.audience.ranks[k]);
            mark_ready(context_.audience.ranks[k]);
        }
    if (without.none()) group_path_.room_below = op.seq() + 1;
    return true;
}

void Endpoint::retract_multicast(Time now, const Outgoing& out) {
    group_path_.unsent(now);
    --counters_.traffic.multicast_packets;
    for (auto& op : slots_.find(out.header.seq)->second.variants)
        if (op->layout().bucket_len == out.header.bucket_len) {
            op->retract(out);
            op->count_sent(out, -1);
        }
    group_path_.served_below = std::min(group_path_.served_below, out.header.seq);
    mark_ready(everybody());
}

// ---- what became of it ------------------------------------------------------------------------------------

void Endpoint::settle_multicast(Time now, const wire::Header& header, std::span<const std::byte> missing) {
    const int index = context_.audience.index(header.source);
    if (index < 0) return;  // it only asks
    const auto member = static_cast<std::size_t>(index);
    Peer& peer = peers_[header.source];
    const std::uint64_t lost_before = group_path_.lost_packets(member);
    group_path_.settle(now, member, header, missing, mean_rate(), peer.path.lost());
    if (group_path_.lost_packets(member) != lost_before) {
        counters_.lost_packets += group_path_.lost_packets(member) - lost_before;
        take_lost(peer);
        mark_ready(header.source);
    }
    for (const std::size_t slow : group_path_.slow()) serve_apart(now, slow, kSlowOps);
    group_path_.slow().clear();
    mark_ready(everybody());
}

// Nothing has come back for a while: ask those that owe an answer, and wait no longer for those that give none.
void Endpoint::ask_members(Time now) {
    group_path_.probe.rang();
    const Audience::Set owing = group_path_.owing(), active = group_path_.active();
    for (std::size_t k = 0; k < context_.audience.ranks.size(); ++k) {
        if (!active[k] || !(owing[k] || group_path_.room_wanted)) continue;
        if (owing[k] && group_path_.unresponsive(now, k)) {
            serve_apart(now, k, kSilentOps);
            continue;
        }
        if (owing[k]) group_path_.asked(now, k);
        peers_[context_.audience.ranks[k]].multicast_probe_due = true;
        mark_ready(context_.audience.ranks[k]);
    }
    mark_ready(everybody());
}

// ---- who is served apart ----------------------------------------------------------------------------------

// From where multicast stands, a member is served by unicast, for so many ops; so is what it has not settled.
void Endpoint::serve_apart(Time now, std::size_t member, Seq ops) {
    const Rank rank = context_.audience.ranks[member];
    Peer& peer = peers_[rank];
    context_.audience.present.reset(member);
    group_path_.dismiss(now, member, peer.path.lost());
    take_lost(peer);
    for (auto& [seq, slot] : slots_)
        for (auto& op : slot.variants) op->uncover(rank);
    if (!slots_.empty()) peer.served_below = std::min(peer.served_below, slots_.begin()->first);
    peer.multicast_from = next_seq_ + std::min(ops, ~next_seq_);
    peer.multicast_left = now;
    mark_ready(rank);
    mark_ready(everybody());
}

// Who has been served apart for long enough, and is alive, is a member again in the ops that begin now.
void Endpoint::serve_together(Time now) {
    for (std::size_t k = 0; k < context_.audience.ranks.size(); ++k) {
        const Peer& peer = peers_[context_.audience.ranks[k]];
        if (group_path_.active()[k] || peer.gone || peer.heard_at <= peer.multicast_left) continue;
        if (next_seq_ < peer.multicast_from) continue;
        group_path_.admit(now, k);
        context_.audience.present.set(k);
    }
}

}  // namespace tailcut
