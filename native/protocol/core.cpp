#include "protocol/core.hpp"

#include "protocol/endpoint.hpp"
#include "protocol/grid/grid_core.hpp"

namespace tailcut {

Counters& Counters::operator+=(const Counters& other) {
    for (const auto count : {&Counters::received_packets, &Counters::received_bytes, &Counters::sent_packets,
                             &Counters::sent_bytes, &Counters::multicast_packets, &Counters::feedback_packets,
                             &Counters::feedback_bytes, &Counters::probe_packets, &Counters::lost_packets,
                             &Counters::resent_packets, &Counters::late_gather_packets,
                             &Counters::forfeited_shards, &Counters::dropped_history})
        this->*count += other.*count;
    for (std::size_t k = 0; k < rejected.size(); ++k) rejected[k] += other.rejected[k];
    return *this;
}

std::unique_ptr<Core> make_core(const Settings& settings, const std::vector<PeerSettings>& peers) {
    if (settings.rows > 1) return std::make_unique<GridCore>(settings, peers);
    return std::make_unique<Endpoint>(settings, peers);
}

Rank senders_to_one(Rank ranks, Rank rows) { return rows > 1 ? GridCore::senders(ranks, rows) : ranks; }

}  // namespace tailcut
