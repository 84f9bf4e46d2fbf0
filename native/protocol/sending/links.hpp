// What an endpoint has with each other rank on the wire: the path to it, what has come from it, and what to say to it next.
// The outbox writes all of it, except for what is the multicast's.
#pragma once

#include <algorithm>
#include <vector>

#include "base/types.hpp"
#include "protocol/multicast/audience.hpp"
#include "protocol/multicast/group_path.hpp"
#include "protocol/sending/arrivals.hpp"
#include "protocol/sending/path.hpp"
#include "protocol/settings.hpp"

namespace tailcut {

struct Link {
    Link(const PeerSettings& settings, Rank rivals, Seq first_seq)
        : settings(settings), path(settings, rivals), told_entered(first_seq), served_below(first_seq) {}

    const PeerSettings settings;
    Path path;
    Arrivals arrivals;

    Seq told_entered;  // our own progress, as far as we have told it
    Seq served_below;  // ops below this have nothing left to send to it
    bool feedback_due = false, probe_due = false, goodbye_due = false;
    bool goodbye_heard = false;  // it has heard ours

    MulticastLink multicast;
};

struct Links {
    Links(const Settings& settings, const std::vector<PeerSettings>& peers);

    Link& operator[](Rank rank) { return peers[rank]; }
    const Link& operator[](Rank rank) const { return peers[rank]; }
    // Something of this op is in flight, or lost and not sent again yet.
    bool awaits(Seq seq) const {
        return everybody.awaits(seq) || std::any_of(peers.begin(), peers.end(),
                                                    [&](const Link& link) { return link.path.awaits(seq); });
    }
    double mean_rate() const;  // of the paths that have anything in flight, bytes/s; 0: not known
    Duration median_rtt(
        Rank self) const;  // of the others: one behind a full queue does not lengthen every grace
    static std::vector<codec::PacketLimits> limits(const Settings& settings,
                                                   const std::vector<PeerSettings>& peers);

    std::vector<Link> peers;
    Audience audience;    // who hears our multicast,
    GroupPath everybody;  // and the path to all of them; without members: idle for ever
};

}  // namespace tailcut
