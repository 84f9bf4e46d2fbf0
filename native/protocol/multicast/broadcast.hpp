// The multicast of an endpoint: its means for all members at once, what became of them, and who is served
// apart. Without members it sends nothing.
#pragma once

#include <cstddef>
#include <optional>
#include <span>

#include "protocol/ops/ops.hpp"
#include "protocol/reports/accounts.hpp"
#include "protocol/roster.hpp"
#include "protocol/sending/letterhead.hpp"
#include "protocol/sending/links.hpp"
#include "protocol/sending/peer_pools.hpp"
#include "protocol/sending/ready_queue.hpp"
#include "protocol/settings.hpp"

namespace tailcut {

class Broadcast {
public:
    Broadcast(const Settings& settings, const Roster& roster, Ops& ops, Links& links, PeerPools& pools,
              Accounts& accounts, const Letterhead& letterhead, ReadyQueue& ready);

    // ---- sending
    bool next(Time now, Outgoing& out);  // to everybody
    void retract(Time now, const Outgoing& out);
    // Whether a FEEDBACK about a rank's multicast is due, and if so, whether it asks for a reply. The call
    // clears it.
    std::optional<bool> take_word(Rank rank);
    void retract_word(Rank rank, bool reply_wanted);
    void ask(Time now);  // no answer has come for a while

    // ---- what others say
    Arrivals& arrivals(Rank rank) { return links_[rank].multicast.arrivals; }
    void answer(Rank rank);
    void settle(Time now, const wire::Header& header, std::span<const std::byte> report);
    void note_leaving(Rank rank);

    // ---- who is served together
    // Members that have been served apart for long enough, and are alive, are members again in the ops that
    // begin now.
    void serve_together(Time now);

private:
    bool may_send(Time now, Op& op);
    bool most_have_room_for(Op& op);
    void serve_apart(Time now, std::size_t member, Seq ops);

    const Settings& settings_;
    const Roster& roster_;
    Ops& ops_;
    Links& links_;
    PeerPools& pools_;
    Accounts& accounts_;
    const Letterhead& letterhead_;
    ReadyQueue& ready_;
    Audience& audience_;
    GroupPath& path_;
};

}  // namespace tailcut
