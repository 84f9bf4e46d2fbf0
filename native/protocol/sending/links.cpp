#include "protocol/sending/links.hpp"

namespace tailcut {
namespace {

// What is lost by multicast is sent again by unicast, so a packet must fit both.
PeerSettings group_path_of(const MulticastSettings& multicast, const std::vector<PeerSettings>& peers) {
    PeerSettings path = multicast.path;
    for (const Rank member : multicast.members) path.limits.lower_to(peers[member].limits);
    return path;
}

}  // namespace

Links::Links(const Settings& settings, const std::vector<PeerSettings>& peer_settings)
    : audience(settings.shape.ranks, settings.multicast.members),
      everybody(group_path_of(settings.multicast, peer_settings), audience.ranks.size(),
                static_cast<Rank>(settings.shape.ranks - 1)) {
    const auto rivals = static_cast<Rank>(settings.shape.ranks - 1);
    for (const PeerSettings& peer : peer_settings) peers.emplace_back(peer, rivals, settings.first_seq);
}

std::vector<codec::PacketLimits> Links::limits(const Settings& settings,
                                               const std::vector<PeerSettings>& peers) {
    std::vector<codec::PacketLimits> limits;
    for (const PeerSettings& peer : peers) limits.push_back(peer.limits);
    if (!settings.multicast.members.empty())
        limits.push_back(group_path_of(settings.multicast, peers).limits);
    return limits;
}

double Links::mean_rate() const {
    double sum = 0;
    int paths = 0;
    for (const Link& link : peers)
        if (link.path.in_flight() && link.path.rate().known()) sum += link.path.rate().bytes_per_s(), ++paths;
    return paths > 0 ? sum / paths : 0;
}

Duration Links::median_rtt(Rank self) const {
    std::vector<Duration> rtts;
    for (Rank rank = 0; rank < peers.size(); ++rank)
        if (rank != self) rtts.push_back(peers[rank].path.rtt());
    if (rtts.empty()) return 0;
    const auto middle = rtts.begin() + static_cast<std::ptrdiff_t>((rtts.size() - 1) / 2);
    std::nth_element(rtts.begin(), middle, rtts.end());
    return *middle;
}

}  // namespace tailcut
