// The state of an endpoint's links, one for each other rank: the path to it, what has come from it, and what
// to tell it next. The outbox writes all of it, except for what belongs to multicast.
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

    Seq told_entered;  // our own progress, as last told to it
    Seq served_below;  // ops below this one have nothing left to send to it
    bool feedback_due = false, probe_due = false;

    MulticastLink multicast;
};

struct Links {
    Links(const Settings& settings, const std::vector<PeerSettings>& peers);

    Link& operator[](Rank rank) { return peers[rank]; }
    const Link& operator[](Rank rank) const { return peers[rank]; }
    // Some packet of this op is in flight, or lost and not sent again yet.
    bool awaits(Seq seq) const {
        return everybody.awaits(seq) || std::any_of(peers.begin(), peers.end(),
                                                    [&](const Link& link) { return link.path.awaits(seq); });
    }
    double mean_rate() const;  // mean over the paths with anything in flight, bytes/s; 0: not known
    // Over the other ranks. It is the median, so that one rank behind a full queue does not lengthen every
    // grace.
    Duration median_rtt(Rank self) const;
    static std::vector<codec::PacketLimits> limits(const Settings& settings,
                                                   const std::vector<PeerSettings>& peers);

    std::vector<Link> peers;
    Audience audience;    // who hears our multicast
    GroupPath everybody;  // the path to all of them; idle if there are no members
};

}  // namespace tailcut
