#include "protocol/multicast/broadcast.hpp"

#include <algorithm>
#include <utility>

namespace tailcut {
namespace {

// How many ops a member is served apart: a member that was too slow is likely to be so again, and one that
// did not answer may have been busy.
constexpr Seq kApartIfSlowOps = 100, kApartIfUnresponsiveOps = 10;

}  // namespace

Broadcast::Broadcast(const Settings& settings, const Roster& roster, Ops& ops, Links& links, PeerPools& pools,
                     Accounts& accounts, const Letterhead& letterhead, ReadyQueue& ready)
    : settings_(settings),
      roster_(roster),
      ops_(ops),
      links_(links),
      pools_(pools),
      accounts_(accounts),
      letterhead_(letterhead),
      ready_(ready),
      audience_(links.audience),
      path_(links.everybody) {}

// ---- sending ----------------------------------------------------------------------------------------------

// The oldest op comes first.
bool Broadcast::next(Time now, Outgoing& out) {
    constexpr auto kEverybody = Destination::everybody();
    auto& slots = ops_.slots();
    for (auto at = slots.lower_bound(path_.served_below); at != slots.end(); ++at) {
        const Seq seq = at->first;
        if (ops_.stopped() && seq >= ops_.next_seq()) break;
        bool over = seq < ops_.next_seq();
        for (auto& op : at->second.variants) {
            over &= op->served(kEverybody) && (op->ended() || !op->entered());
            if (!op->pending(kEverybody)) continue;
            if (!may_send(now, *op)) return false;
            const Audience::Set to = op->covered();
            op->next_packet(now, kEverybody, out);
            letterhead_.complete(out.header);
            if (out.header.flags & wire::kLastPart && !op->pending(kEverybody))
                out.header.flags |= wire::kReplyWanted;
            path_.stamp(now, out.header);
            path_.sent(out.header, out.parcel,
                       static_cast<std::uint32_t>(wire::kHeaderBytes + out.payload.size()), to);
            op->count_sent(out);
            ++accounts_.counters.traffic.multicast_packets;
            return true;
        }
        if (over && path_.served_below == seq) path_.served_below = seq + 1;
    }
    if (settings_.resend && path_.in_flight()) path_.arm_probe(now);  // the last packet may be lost
    return false;
}

// The number of senders that a receiver accepts at once is ignored here: all owners multicast to all.
bool Broadcast::may_send(Time now, Op& op) {
    path_.room_wanted = !most_have_room_for(op);
    const Time at = path_.room_wanted ? kNever : path_.clear_at(now, op.layout().shard_bytes());
    if (at == kNever)
        path_.arm_probe(now);
    else if (at > now)
        ready_.wake(Destination::everybody(), at);
    return at <= now;
}

// If most members have room, the others are served by unicast in this op, once they have room. Room only
// grows, so ops for which all had room are not checked again.
bool Broadcast::most_have_room_for(Op& op) {
    if (op.seq() < path_.room_below) return true;
    const Audience::Set covered = op.covered();
    Audience::Set without;
    for (std::size_t k = 0; k < audience_.ranks.size(); ++k)
        without[k] = covered[k] && !pools_.have_room_for_means(audience_.ranks[k], op.seq());
    if (2 * without.count() > covered.count()) return false;
    for (std::size_t k = 0; without.any() && k < audience_.ranks.size(); ++k)
        if (without[k]) {
            op.serve_apart(audience_.ranks[k]);
            ready_.push(audience_.ranks[k]);
        }
    if (without.none()) path_.room_below = op.seq() + 1;
    return true;
}

void Broadcast::retract(Time now, const Outgoing& out) {
    path_.unsent(now);
    --accounts_.counters.traffic.multicast_packets;
    if (Op* op = ops_.find(out.header.seq, bucket_of(out.header))) {
        op->retract(out);
        op->count_sent(out, -1);
    }
    path_.served_below = std::min(path_.served_below, out.header.seq);
    ready_.push(Destination::everybody());
}

std::optional<bool> Broadcast::take_word(Rank rank) {
    MulticastLink& link = links_[rank].multicast;
    if (!std::exchange(link.feedback_due, false) && !link.probe_due) return std::nullopt;
    return std::exchange(link.probe_due, false);
}

void Broadcast::retract_word(Rank rank, bool reply_wanted) {
    links_[rank].multicast.feedback_due = true;
    links_[rank].multicast.probe_due |= reply_wanted;
}

// Asks members that owe an answer, and stops waiting for those that give none.
void Broadcast::ask(Time now) {
    if (path_.probe.at() > now) return;
    path_.probe.rang();
    const Audience::Set owing = path_.owing(), active = path_.active();
    for (std::size_t k = 0; k < audience_.ranks.size(); ++k) {
        if (!active[k] || !(owing[k] || path_.room_wanted)) continue;
        if (owing[k] && path_.unresponsive(now, k)) {
            serve_apart(now, k, kApartIfUnresponsiveOps);
            continue;
        }
        if (owing[k]) path_.asked(now, k);
        links_[audience_.ranks[k]].multicast.probe_due = true;
        ready_.push(audience_.ranks[k]);
    }
    ready_.push(Destination::everybody());
}

// ---- what others say --------------------------------------------------------------------------------------

void Broadcast::answer(Rank rank) {
    links_[rank].multicast.feedback_due = true;
    ready_.push(rank);
}

void Broadcast::settle(Time now, const wire::Header& header, std::span<const std::byte> report) {
    const int index = audience_.index(header.source);
    if (index < 0) return;  // not a member of ours: it only asks
    const auto member = static_cast<std::size_t>(index);
    const std::uint64_t lost_before = path_.lost_packets(member);
    path_.settle(now, member, header, report, settings_.multicast.path.paced ? links_.mean_rate() : 0,
                 links_[header.source].path.lost());
    accounts_.counters.lost_packets += path_.lost_packets(member) - lost_before;
    for (const std::size_t slow : path_.slow()) serve_apart(now, slow, kApartIfSlowOps);
    path_.slow().clear();
    ready_.push(Destination::everybody());
}

void Broadcast::note_leaving(Rank rank) {
    if (const int member = audience_.index(rank); member >= 0)
        audience_.present.reset(static_cast<std::size_t>(member));
}

// ---- who is served apart ----------------------------------------------------------------------------------

// Serves a member by unicast, from the ops at hand on and for this many more. What it has not settled goes by
// unicast as well.
void Broadcast::serve_apart(Time now, std::size_t member, Seq ops) {
    const Rank rank = audience_.ranks[member];
    Link& link = links_[rank];
    audience_.present.reset(member);
    path_.dismiss(now, member, link.path.lost());
    auto& slots = ops_.slots();
    for (auto& [seq, slot] : slots)
        for (auto& op : slot.variants) op->serve_apart(rank);
    if (!slots.empty()) link.served_below = std::min(link.served_below, slots.begin()->first);
    link.multicast.from = ops_.next_seq() + std::min(ops, ~ops_.next_seq());
    link.multicast.left_at = now;
    ready_.push(rank);
    ready_.push(Destination::everybody());
}

void Broadcast::serve_together(Time now) {
    for (std::size_t k = 0; k < audience_.ranks.size(); ++k) {
        const Rank rank = audience_.ranks[k];
        const MulticastLink& link = links_[rank].multicast;
        if (path_.active()[k] || roster_[rank].leaving || roster_[rank].heard_at <= link.left_at) continue;
        if (ops_.next_seq() < link.from) continue;
        path_.admit(now, k);
        audience_.present.set(k);
    }
}

}  // namespace tailcut
