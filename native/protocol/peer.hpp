// What an endpoint knows of one other rank: how far it is, the path to it, and what has come from it.
#pragma once

#include "protocol/arrivals.hpp"
#include "protocol/path.hpp"
#include "protocol/types.hpp"

namespace tailcut {

class Peer {
public:
    Peer(const PeerSettings& settings, Rank rivals) : settings(settings), path(settings, rivals) {}

    const PeerSettings settings;
    Path path;
    Arrivals arrivals, multicast_arrivals;

    // progress
    Seq entered = 0;       // ops it is known to have entered
    Seq told_entered = 0;  // our own progress, as far as we have told it
    Seq served_below = 0;  // ops below this have nothing left to send to it
    bool gone = false;     // said goodbye: enters no op from `gone_seq` on
    Seq gone_seq = 0;
    bool left(Seq seq) const { return gone && seq >= gone_seq; }

    // presence
    Time heard_at = -1;
    int quiet_ops = 0;        // that ended in a row without a word from it
    std::uint8_t incast = 0;  // senders it accepts at once; 0: any number

    // our multicast, if it is a member
    Seq multicast_from = 0;    // ops before are for unicast: it had been too slow, or silent,
    Time multicast_left = -1;  // since then

    // what to say next
    bool ready = false;     // in the endpoint's queue of peers with something to say
    Time wake_at = kNever;  // back into that queue: the pace holds its packets until then
    bool multicast_feedback_due = false, multicast_probe_due = false;
    bool feedback_due = false, probe_due = false, goodbye_due = false, goodbye_heard = false;

    // packets, up to the last report
    std::uint64_t reported_sent = 0, reported_lost = 0, reported_came = 0, reported_missing = 0;
};

}  // namespace tailcut
