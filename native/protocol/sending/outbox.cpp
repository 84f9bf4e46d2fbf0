#include "protocol/sending/outbox.hpp"

#include <algorithm>
#include <limits>
#include <memory>
#include <vector>

namespace tailcut {
namespace {

constexpr Duration kDeafAfter = 20 * kMillisecond;
constexpr std::size_t kBurstBytes = 60 * 1024;  // sent in a row to one peer: what one segmented send can take

}  // namespace

Outbox::Outbox(const Settings& settings, Roster& roster, Ops& ops, Links& links, PeerPools& pools,
               Accounts& accounts, StateChannel& state)
    : settings_(settings),
      roster_(roster),
      ops_(ops),
      links_(links),
      pools_(pools),
      accounts_(accounts),
      state_(state),
      letterhead_(settings, ops),
      ready_(settings.shape.self, settings.shape.ranks),
      broadcast_(settings, roster, ops, links, pools, accounts, letterhead_, ready_),
      late_service_(roster, ops, links),
      goodbye_(roster),
      shares_(settings.shape.ranks) {}

// ---- whose turn it is -------------------------------------------------------------------------------------

bool Outbox::transmit(Time now, Outgoing& out) {
    const bool state = state_.pending();
    const bool urgent = state && state_.urgent();
    const bool found = (state && state_turns_.due(now, urgent) && next_state(now, out)) ||
                       next_alive(now, out) ||
                       (state && late_service_.nothing_else_to_send() && next_state(now, out));
    state_wake_ = !found && state ? state_turns_.due_at(urgent) : kNever;
    if (!found) return false;
    Traffic& traffic = accounts_.counters.traffic;
    ++traffic.sent_packets;
    traffic.sent_bytes += wire::kHeaderBytes + out.payload.size();
    return true;
}

bool Outbox::next_alive(Time now, Outgoing& out) {
    for (; !ready_.empty(); ready_.pop(), burst_bytes_ = 0) {
        const Destination to = ready_.front();
        const bool found = to.is_everybody() ? broadcast_.next(now, out) : next_for(now, to.rank(), out);
        if (to.is_everybody()) next_probe_ = std::min(next_probe_, links_.everybody.probe.at());
        if (!found) continue;
        state_turns_.note_other();
        burst_bytes_ += out.payload.size();
        if (burst_bytes_ >= kBurstBytes) {
            ready_.pass();
            burst_bytes_ = 0;
        }
        return true;
    }
    return false;
}

bool Outbox::next_state(Time now, Outgoing& out) {
    if (!state_.next(now, out)) return false;
    state_turns_.taken(now);
    letterhead_.complete(out.header);
    links_[out.to.rank()].path.stamp(now, out.header);
    accounts_.count_state(out);
    return true;
}

bool Outbox::next_for(Time now, Rank rank, Outgoing& out) {
    Link& link = links_[rank];
    const bool leaving = roster_[rank].leaving;
    if (goodbye_.due(rank)) {
        goodbye_.said(rank);
        say(now, rank, wire::Type::kGoodbye, !leaving, out);
        if (!leaving) ask_later(now, rank);
        return true;
    }
    if (link.feedback_due || link.probe_due) {
        say(now, rank, wire::Type::kFeedback, link.probe_due, out);
        link.feedback_due = link.probe_due = false;
        return true;
    }
    if (const auto reply_wanted = broadcast_.take_word(rank)) {
        say(now, rank, wire::Type::kFeedback, *reply_wanted, out, true);
        return true;
    }
    if (next_data(now, rank, out)) return true;
    if (link.told_entered < ops_.next_seq() && !leaving) {  // it may be waiting to hear that we are here
        say(now, rank, wire::Type::kFeedback, false, out);
        return true;
    }
    return false;
}

// Receivers may ask to hear only a few senders at once. Each sender then sends only to the first few pending
// ranks in its order, which starts at the next rank. As every sender starts elsewhere, each receiver hears
// about as many as it asked for. The least number applies to all receivers: with individual numbers, a
// receiver that asks for fewer than the others would be left until last, and would then hear all senders at
// once.
bool Outbox::has_turn(Rank rank, const Op& op) const {
    std::uint8_t before = roster_.least_incast();
    if (before == 0) return true;
    for (std::size_t step = 1; step < roster_.ranks(); ++step) {
        const auto other = static_cast<Rank>((roster_.self() + step) % roster_.ranks());
        if (other == rank) return true;
        if (!roster_.silent(other) && op.pending(other) && --before == 0) return false;
    }
    return true;
}

// A rank that has been served leaves its place to those that wait for one.
void Outbox::pass_turn(Rank rank, const Op& op) {
    if (!turn_awaited_ || op.pending(rank)) return;
    turn_awaited_ = false;
    note_news();
}

// ---- DATA -------------------------------------------------------------------------------------------------

// The engine of a rank that is behind serves its shard of live ops, and all wait for that. So what is alive comes
// before the history that only this rank waits for.
bool Outbox::next_data(Time now, Rank rank, Outgoing& out) {
    Link& link = links_[rank];
    held_back_ = false;
    const Seq alive = ops_.lags(rank) ? std::max(link.served_below, ops_.first_timed()) : link.served_below;
    if (next_data_of(now, rank, alive, std::numeric_limits<Seq>::max(), out)) return true;
    if (alive > link.served_below && next_data_of(now, rank, link.served_below, alive, out)) return true;
    if (held_back_) return false;
    link.path.starved();
    if (next_late(now, rank, out)) return true;
    if (settings_.resend && link.path.in_flight()) ask_later(now, rank);  // the last packet may be lost
    return false;
}

// The oldest op comes first, so that an op that is nearly done is not delayed by the next.
bool Outbox::next_data_of(Time now, Rank rank, Seq first, Seq last, Outgoing& out) {
    Link& link = links_[rank];
    auto& slots = ops_.slots();
    for (auto at = slots.lower_bound(first); at != slots.end() && at->first < last; ++at) {
        const Seq seq = at->first;
        if (roster_[rank].left(seq) || (ops_.stopped() && seq >= ops_.next_seq())) break;
        bool over = seq < ops_.next_seq();
        const bool room = pools_.have_room_for_means(rank, seq);
        if (!room) ask_later(now, rank);  // it says when it has gone on
        const bool alive = last > ops_.next_seq();
        if (!room && !(alive && pools_.have_room_for_contributions(rank, seq, ops_.first_timed()))) break;
        for (auto& op : at->second.variants) {
            const bool fresh = room ? op->pending(rank) : op->owes(rank);
            const bool lost = link.path.lost().any(seq, [&](const Parcel& parcel) {
                return op->bucket() == parcel.bucket && op->again(rank, parcel) == Op::Again::kNow &&
                       (room || parcel.stage == wire::Stage::kScatter);
            });
            over &= !lost;
            over &= op->served(rank) && op->reduced() && (op->ended() || !op->entered());
            if (!fresh && !lost) continue;
            if (!may_send(now, rank, *op)) {
                held_back_ = true;
                return false;
            }
            if (!next_of(now, rank, *op, room, out)) {
                if (fresh) pass_turn(rank, *op);  // nothing is left for it
                continue;
            }
            dispatch(now, rank, *op, out);
            pass_turn(rank, *op);
            return true;
        }
        if (over && link.served_below == seq) link.served_below = seq + 1;
    }
    return false;
}

// Contributions come before means, for which there must be room. Within each, fresh packets come before lost ones.
bool Outbox::next_of(Time now, Rank rank, Op& op, bool room, Outgoing& out) {
    if (op.owes(rank) && op.next_packet(now, rank, out)) return true;
    if (next_lost(now, rank, op, wire::Stage::kScatter, out)) return true;
    if (!room) return false;
    if (op.pending(rank) && op.next_packet(now, rank, out)) return true;
    return next_lost(now, rank, op, wire::Stage::kGather, out);
}

bool Outbox::next_lost(Time now, Rank rank, Op& op, wire::Stage stage, Outgoing& out) {
    LostParcels& lost = links_[rank].path.lost();
    const auto now_wanted = [&](const Parcel& parcel) { return op.again(rank, parcel) == Op::Again::kNow; };
    while (const auto parcel = lost.take(op.seq(), op.bucket(), stage, now_wanted))
        if (op.repeat(now, rank, *parcel, out)) return true;
    return false;
}

bool Outbox::next_late(Time now, Rank rank, Outgoing& out) {
    Op* op = late_service_.op_for(rank);
    if (!op || !may_send(now, rank, *op) || !put_late(now, rank, *op, out)) return false;
    // To learn whether a queue has built up.
    if (!links_[rank].path.in_flight()) out.header.flags |= wire::kReplyWanted;
    dispatch(now, rank, *op, out);
    return true;
}

// What was lost before comes first: it is the oldest.
bool Outbox::put_late(Time now, Rank rank, Op& op, Outgoing& out) {
    LostParcels& lost = links_[rank].path.lost();
    const auto wanted = [&](const Parcel& parcel) { return op.again(rank, parcel) == Op::Again::kLate; };
    for (const wire::Stage stage : {wire::Stage::kScatter, wire::Stage::kGather})
        while (const auto parcel = lost.take(op.seq(), op.bucket(), stage, wanted))
            if (op.repeat(now, rank, *parcel, out)) return true;
    while (op.owes_late(rank))
        if (op.next_late(now, rank, out)) return true;
    return false;
}

// Nobody has answered to anything for longer than several packets in a row may be lost.
bool Outbox::deaf(Time now) const {
    const Time since = roster_.unanswered_since();
    return since != kNever && now - since > std::max(kDeafAfter, roster_.repeat_time());
}

// Whether the path has credit, and the pace allows a packet now.
bool Outbox::may_send(Time now, Rank rank, const Op& op) {
    Link& link = links_[rank];
    if (!has_turn(rank, op)) {
        turn_awaited_ = true;
        return false;
    }
    const Time at = link.path.clear_at(now, op.layout().shard_bytes(), deaf(now));
    if (at <= now) return true;
    ask_later(now, rank);
    if (at != kNever) ready_.wake(rank, at);
    return false;
}

void Outbox::dispatch(Time now, Rank rank, Op& op, Outgoing& out) {
    Link& link = links_[rank];
    roster_.note_spoke(now);
    letterhead_.complete(out.header);
    if (out.header.flags & wire::kLastPart && !op.pending(rank)) out.header.flags |= wire::kReplyWanted;
    link.path.stamp(now, out.header);
    link.path.sent(out.header, out.parcel,
                   static_cast<std::uint32_t>(wire::kHeaderBytes + out.payload.size()));
    op.count_sent(out);
    accounts_.counters.traffic.resent_packets += out.again;
    if (op.entered()) link.told_entered = std::max(link.told_entered, op.seq() + 1);
}

void Outbox::retract(Time now, const Outgoing& out) {
    Traffic& traffic = accounts_.counters.traffic;
    --traffic.sent_packets;
    traffic.sent_bytes -= wire::kHeaderBytes + out.payload.size();
    if (out.to.is_everybody()) return broadcast_.retract(now, out);
    const Rank rank = out.to.rank();
    Link& link = links_[rank];
    if (out.header.type == wire::Type::kState) {
        accounts_.count_state(out, -1);
        return state_.retract(out);
    }
    if (out.header.type != wire::Type::kData) {
        const bool reply_wanted = out.header.flags & wire::kReplyWanted;
        accounts_.count_word(out, -1);
        if (out.header.multicast()) {
            broadcast_.retract_word(rank, reply_wanted);
        } else {
            link.feedback_due = true;
            link.probe_due |= reply_wanted;
            if (out.header.type == wire::Type::kGoodbye) goodbye_.repeat(rank);
        }
    } else {
        link.path.unsent(now);
        traffic.resent_packets -= out.again;
        if (out.again) link.path.lost().add(out.parcel);
        if (Op* op = ops_.find(out.header.seq, bucket_of(out.header))) {
            op->retract(out);
            if (out.late) ops_.late(rank).insert(out.header.seq);
            op->count_sent(out, -1);
        }
        link.served_below = std::min(link.served_below, out.header.seq);
    }
    ready_.push(rank);
}

// ---- FEEDBACK and GOODBYE ---------------------------------------------------------------------------------

void Outbox::say(Time now, Rank rank, wire::Type type, bool reply_wanted, Outgoing& out, bool multicast) {
    Link& link = links_[rank];
    out = {};
    out.to = rank;
    out.header.type = type;
    out.header.flags = (reply_wanted ? wire::kReplyWanted : 0) |
                       (roster_[rank].leaving ? wire::kGoodbyeKnown : 0) | (multicast ? wire::kMulticast : 0);
    if (type == wire::Type::kFeedback && roster_[roster_.self()].away) out.header.flags |= wire::kAway;
    if (type == wire::Type::kFeedback && ops_.has_skipped()) out.header.flags |= wire::kSkipped;
    out.header.seq = type == wire::Type::kGoodbye ? goodbye_.unserved_from() : ops_.next_seq();
    const LrScale& own = ops_.terms().lr_scale;
    const LrScale& known = own.newer_than(roster_.lr_scale()) ? own : roster_.lr_scale();
    out.header.lr_scale = known.scale;
    out.header.lr_period = known.period;
    // Senders that take turns bring unequal amounts within a few milliseconds, which is no reason to yield.
    out.header.share = ops_.terms().incast == 0 ? shares_.of(rank) : 0;
    if (ops_.served_from() > 0 && (ops_.lags(rank) || roster_[rank].entered <= ops_.served_from())) {
        out.header.flags |= wire::kForgotten;
        out.header.served_from = ops_.served_from();
    } else {
        accounts_.tell_lacked(rank, out.header);
    }
    letterhead_.complete(out.header);
    if (multicast)
        links_.everybody.stamp(now, out.header);
    else
        link.path.stamp(now, out.header);
    Arrivals& arrivals = multicast ? broadcast_.arrivals(rank) : link.arrivals;
    if (auto report = arrivals.report(out.header); !report.empty()) {
        const auto keeper = std::make_shared<const std::vector<std::uint64_t>>(std::move(report));
        out.payload = std::as_bytes(std::span(*keeper));
        out.keeper = keeper;
    }
    link.told_entered = ops_.next_seq();
    accounts_.count_word(out);
}

void Outbox::say_goodbye(Seq unserved_from) {
    goodbye_.begin(unserved_from);
    note_news();
}

void Outbox::answer(Rank rank) {
    links_[rank].feedback_due = true;
    ready_.push(rank);
}

// ---- what others say --------------------------------------------------------------------------------------

void Outbox::hear(Time now, const wire::Header& header, std::size_t bytes) {
    Link& link = links_[header.source];
    const bool multicast = header.multicast();
    Arrivals& arrivals = multicast ? broadcast_.arrivals(header.source) : link.arrivals;
    arrivals.note(now, header);
    bool due = header.flags & wire::kReplyWanted;
    if (header.type == wire::Type::kData) {
        const std::size_t payload_bytes = bytes - wire::kHeaderBytes;
        const bool cut = payload_bytes < wire::stated_payload_bytes(header);
        if (settings_.resend && wire::lacks_granules(header, payload_bytes))
            arrivals.refuse(header.number);  // it counts as lost
        else if (cut && header.stage() == wire::Stage::kGather && settings_.carry && header.key != 0)
            arrivals.note_cut(header.number);
        shares_.count(now, header.source, bytes);
        // The cost as the source charged it, even if a switch has trimmed the packet.
        const auto cost =
            static_cast<std::uint32_t>(wire::kHeaderBytes + wire::stated_payload_bytes(header)) +
            kDatagramOverheadBytes;
        due |= 2 * arrivals.count(cost) >= settings_.window_bytes;
    }
    if (!due) return;
    if (multicast)
        broadcast_.answer(header.source);
    else
        answer(header.source);
}

// A packet that is found lost is sent again while its op can use it.
void Outbox::settle(Time now, const wire::Header& header, std::span<const std::byte> report) {
    const Rank rank = header.source;
    Link& link = links_[rank];
    if (header.multicast()) {
        broadcast_.settle(now, header, report);
    } else {
        const std::uint64_t lost_before = link.path.lost_packets();
        link.path.settle(now, header, report, link.settings.paced ? links_.mean_rate() : 0,
                         [&](const Parcel& parcel) {
                             Op* op = ops_.find(parcel.seq, parcel.bucket);
                             if (op) op->note_delivered(rank, parcel);
                         });
        accounts_.counters.lost_packets += link.path.lost_packets() - lost_before;
        ready_.push(rank);
    }
    take_lost(rank);
    if (header.flags & wire::kGoodbyeKnown) goodbye_.note_heard(rank);
    if (goodbye_.unheard(rank)) ask_later(now, rank);  // settling has disarmed the probe
}

// Keeps those lost packets that can still be used.
void Outbox::take_lost(Rank rank) {
    Link& link = links_[rank];
    LostParcels& lost = link.path.lost();
    if (lost.empty()) return;
    lost.drop_if([&](const Parcel& parcel) {
        Op* op = ops_.find(parcel.seq, parcel.bucket);
        if (!settings_.resend || roster_[rank].left(parcel.seq) || !op) return true;
        const Op::Again again = op->again(rank, parcel);
        if (again == Op::Again::kLate) ops_.late(rank).insert(parcel.seq);
        return again == Op::Again::kNever;
    });
    if (lost.empty()) return;
    link.served_below = std::min(link.served_below, lost.oldest());
    ready_.push(rank);
}

void Outbox::refuse(const wire::Header& header) {
    // The source sends it again, by unicast. A contribution would come too late by then.
    if (header.multicast())
        broadcast_.arrivals(header.source).refuse(header.number);
    else if (header.stage() == wire::Stage::kGather)
        links_[header.source].arrivals.refuse(header.number);
}

void Outbox::note_entered(Rank rank) {
    ready_.push(rank);
    if (links_.audience.index(rank) >= 0) ready_.push(Destination::everybody());
}

void Outbox::note_leaving(Rank rank) { broadcast_.note_leaving(rank); }

// ---- probes -----------------------------------------------------------------------------------------------

void Outbox::ask_later(Time now, Rank rank) {
    Path& path = links_[rank].path;
    path.arm_probe(now);
    next_probe_ = std::min(next_probe_, path.probe.at());
}

void Outbox::advance(Time now) {
    ready_.advance(now);
    if (now >= state_wake_) state_wake_ = kNever;
    if (now < next_probe_) return;
    broadcast_.ask(now);
    next_probe_ = links_.everybody.probe.at();
    for (Rank rank = 0; rank < roster_.ranks(); ++rank) {
        Link& link = links_[rank];
        if (link.path.probe.at() <= now) {
            link.path.probe.rang();
            link.probe_due = true;
            if (goodbye_.unheard(rank)) goodbye_.repeat(rank);
            ready_.push(rank);
        }
        next_probe_ = std::min(next_probe_, link.path.probe.at());
    }
}

}  // namespace tailcut
