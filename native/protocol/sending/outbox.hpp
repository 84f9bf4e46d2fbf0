// What an endpoint sends and to whom next, what became of it, and the probes that ask when no answer comes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>

#include "protocol/multicast/broadcast.hpp"
#include "protocol/ops/ops.hpp"
#include "protocol/reports/accounts.hpp"
#include "protocol/roster.hpp"
#include "protocol/sending/goodbye.hpp"
#include "protocol/sending/late_service.hpp"
#include "protocol/sending/letterhead.hpp"
#include "protocol/sending/links.hpp"
#include "protocol/sending/peer_pools.hpp"
#include "protocol/sending/ready_queue.hpp"
#include "protocol/sending/shares.hpp"
#include "protocol/settings.hpp"
#include "protocol/state/background_turns.hpp"
#include "protocol/state/state_channel.hpp"

namespace tailcut {

class Outbox {
public:
    Outbox(const Settings& settings, Roster& roster, Ops& ops, Links& links, PeerPools& pools,
           Accounts& accounts, StateChannel& state);

    bool transmit(Time now, Outgoing& out);
    void retract(Time now, const Outgoing& out);  // not sent after all because the host is busy; newest first

    // ---- what others say
    // A datagram of this many bytes has come.
    void hear(Time now, const wire::Header& header, std::size_t bytes);
    // FEEDBACK and GOODBYE say what became of the packets that were sent.
    void settle(Time now, const wire::Header& header, std::span<const std::byte> report);
    void refuse(const wire::Header& header);  // there was no room for the packet
    void answer(Rank rank);                   // send a FEEDBACK soon
    void note_entered(Rank rank);             // the peer has entered another op
    void note_leaving(Rank rank);

    // ---- what the local rank does
    // There may be packets for anybody.
    void note_news() { ready_.push_all(links_.everybody.active().any()); }
    void begin_op(Time now) { broadcast_.serve_together(now); }
    // Tells everybody that no op from the next one on is entered, and that none from `unserved_from` on is
    // served.
    void say_goodbye(Seq unserved_from);

    bool empty() const { return ready_.empty(); }
    Time next_timer() const { return std::min({ready_.next_wake(), next_probe_, state_wake_}); }
    void advance(Time now);

private:
    bool next_alive(Time now, Outgoing& out);
    bool next_state(Time now, Outgoing& out);
    bool next_for(Time now, Rank rank, Outgoing& out);
    bool next_data(Time now, Rank rank, Outgoing& out);
    bool next_data_of(Time now, Rank rank, Seq first, Seq last, Outgoing& out);
    bool next_of(Time now, Rank rank, Op& op, bool room, Outgoing& out);
    bool next_lost(Time now, Rank rank, Op& op, wire::Stage stage, Outgoing& out);
    bool next_late(Time now, Rank rank, Outgoing& out);
    bool put_late(Time now, Rank rank, Op& op, Outgoing& out);
    void dispatch(Time now, Rank rank, Op& op, Outgoing& out);
    bool deaf(Time now) const;
    bool may_send(Time now, Rank rank, const Op& op);
    bool has_turn(Rank rank, const Op& op) const;
    void pass_turn(Rank rank, const Op& op);
    void say(Time now, Rank rank, wire::Type type, bool reply_wanted, Outgoing& out, bool multicast = false);
    void ask_later(Time now, Rank rank);
    void take_lost(Rank rank);

    const Settings& settings_;
    Roster& roster_;
    Ops& ops_;
    Links& links_;
    PeerPools& pools_;
    Accounts& accounts_;
    StateChannel& state_;
    BackgroundTurns state_turns_;
    Time state_wake_ = kNever;  // STATE was held back until then
    Letterhead letterhead_;
    ReadyQueue ready_;
    Broadcast broadcast_;
    LateService late_service_;
    Goodbye goodbye_;
    Shares shares_;
    std::size_t burst_bytes_ = 0;  // sent in a row to the destination at the front of ready_
    bool turn_awaited_ = false;    // some rank is not sent to because others come first
    bool held_back_ = false;       // there was DATA for the rank, and it has to wait
    Time next_probe_ = kNever;     // no probe is due before
};

}  // namespace tailcut
