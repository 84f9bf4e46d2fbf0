// Other people's TCP flows that come and go over every port: the neighbour behind it receives one flow after the other from
// the neighbour behind the port before it, with pauses in between. They take part in the network as any packet does.
#pragma once

#include <vector>

#include "sim/host_freezes.hpp"
#include "sim/network.hpp"
#include "sim/transport.hpp"

namespace tailcut::sim {

class Neighbours {
public:
    Neighbours(const NetworkSpec& spec, Network& network);

    // Whether what happened was theirs; then they have taken it.
    bool take(const Happening& happening);

private:
    enum Alarm : std::uint8_t { kFlow = Transport::kAlarm, kBegin };

    void plan(Rank port);

    const NeighbourFlows spec_;
    const std::uint64_t seed_;
    Network& network_;
    HostFreezes never_;
    Transport transport_;
    std::vector<std::uint64_t> flows_;  // by port: how many have begun
};

}  // namespace tailcut::sim
