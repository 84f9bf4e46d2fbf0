#include "sim/neighbours.hpp"

#include <cmath>

namespace tailcut::sim {
namespace {

constexpr std::uint64_t kGaps = 0x6E65696768626F75;  // apart from what else is drawn from the seed

TransportSpec transport_of(const NeighbourFlows& flows) {
    TransportSpec spec;
    spec.segment_bytes = flows.segment_bytes;
    spec.header_bytes = flows.header_bytes;
    return spec;
}

}  // namespace

// Flow k leads to the neighbour behind port k.
Neighbours::Neighbours(const NetworkSpec& spec, Network& network)
    : spec_(spec.neighbours),
      seed_(spec.seed),
      network_(network),
      never_({}, static_cast<Rank>(2 * network.hosts())),
      transport_(transport_of(spec.neighbours), network, never_,
                 [this](Transport::FlowId flow, std::uint64_t) { plan(static_cast<Rank>(flow)); }) {
    if (spec_.flow_bytes == 0 || network.hosts() < 2) return;
    flows_.resize(network.hosts());
    for (Rank port = 0; port < network.hosts(); ++port) {
        const auto before = static_cast<Rank>((port + network.hosts() - 1) % network.hosts());
        transport_.open(network.neighbour(before), network.neighbour(port));
        plan(port);
    }
}

bool Neighbours::take(const Happening& happening) {
    if (happening.kind != Happening::Kind::kAlarm) {
        if (!network_.is_neighbour(happening.packet.source)) return false;
        happening.kind == Happening::Kind::kArrived ? transport_.arrived(happening.packet)
                                                    : transport_.dropped(happening.packet);
        return true;
    }
    if (!network_.is_neighbour(happening.host)) return false;
    if (happening.alarm == kBegin) {
        transport_.renew(happening.number);
        transport_.send(happening.number, spec_.flow_bytes, 0);
    } else {
        transport_.on_alarm(happening.number);
    }
    return true;
}

// When the next flow to a port begins is addressed by port and flow.
void Neighbours::plan(Rank port) {
    const std::uint64_t place = std::uint64_t{port} << 40 | flows_[port]++;
    const double unit = static_cast<double>(mix(seed_ ^ kGaps ^ mix(place)) >> 11) * 0x1p-53;
    const auto gap = static_cast<Duration>(-std::log1p(-unit) * static_cast<double>(spec_.gap_mean));
    network_.alarm(network_.now() + gap, network_.neighbour(port), kBegin, port);
}

}  // namespace tailcut::sim
