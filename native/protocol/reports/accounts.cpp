#include "protocol/reports/accounts.hpp"

#include <algorithm>
#include <utility>

namespace tailcut {

void Accounts::note_late(Time now, const wire::Header& header, std::size_t payload_bytes) {
    ++counters.traffic.late_packets;
    late_.note_packet(now, header, payload_bytes);
}

void Accounts::complete(OpReport& report, const Op& op) {
    late_.tell(report);
    complete_links(report);
    late_.note_end(report, op);
    const std::uint64_t told = std::exchange(told_verdicts_, counters.split_verdicts);
    report.split_verdicts = static_cast<std::uint32_t>(counters.split_verdicts - told);
}

void Accounts::tell_lacked(Rank rank, wire::Header& header) const {
    header.error_energy = lacked_[rank].own;
    header.error_op = lacked_[rank].op;
}

void Accounts::hear_lacked(const wire::Header& header) {
    Lacked& lacked = lacked_[header.source];
    if (std::exchange(lacked.told_op, header.error_op) == header.error_op)
        return;  // it repeats this in every FEEDBACK
    lacked.told = std::max(lacked.told, header.error_energy);
}

void Accounts::complete_links(OpReport& report) {
    const auto since = [](std::uint64_t now, std::uint64_t& before) {
        return static_cast<std::uint32_t>(now - std::min(now, std::exchange(before, now)));
    };
    for (Rank rank = 0; rank < ranks_; ++rank) {
        const Link& link = links_[rank];
        std::uint64_t sent = link.path.sent_packets(), lost = link.path.lost_packets();
        if (const int member = links_.audience.index(rank); member >= 0) {
            sent += links_.everybody.settled_packets(static_cast<std::size_t>(member));
            lost += links_.everybody.lost_packets(static_cast<std::size_t>(member));
        }
        const auto both = [&](auto count) {
            return (link.arrivals.*count)() + (link.multicast.arrivals.*count)();
        };
        Reported& before = reported_[rank];
        LinkReport& told = report.links[rank];
        told.sent_packets = since(sent, before.sent);
        told.sent_lost_packets = since(lost, before.lost);
        told.received_packets = since(both(&Arrivals::came), before.came);
        told.received_lost_packets = since(both(&Arrivals::missing), before.missing);
        told.delivered_bytes = since(link.path.delivered_bytes(), before.delivered_bytes);
        const Duration busy = link.path.busy(report.ended_at);
        told.in_flight = busy - std::exchange(before.busy, busy);
        Lacked& lacked = lacked_[rank];
        told.lacked_frac = std::exchange(lacked.told, 0.0f);
        lacked.op = static_cast<std::uint16_t>(report.seq);
        lacked.own = told.gather.coords == 0
                         ? 0.0f
                         : static_cast<float>(told.gather.missing) / static_cast<float>(told.gather.coords);
    }
}

}  // namespace tailcut
