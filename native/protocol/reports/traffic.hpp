// Packets and bytes, of one op until it has ended or of an endpoint since it was made.
#pragma once

#include <cstdint>

#include "protocol/reports/fields.hpp"

namespace tailcut {

struct Traffic {
    std::uint64_t sent_packets = 0, sent_bytes = 0;
    std::uint64_t received_packets = 0, received_bytes = 0;
    std::uint64_t multicast_packets = 0;  // of those sent: one packet to many ranks
    std::uint64_t resent_packets = 0;     // of those sent: sent again because they were lost
    std::uint64_t trimmed_packets = 0;    // of those received
    std::uint64_t late_packets = 0;       // DATA that came after its stage had ended

    template <typename Visit>
    static constexpr void visit_fields(Visit&& visit) {
        visit("sent_packets", &Traffic::sent_packets);
        visit("sent_bytes", &Traffic::sent_bytes);
        visit("received_packets", &Traffic::received_packets);
        visit("received_bytes", &Traffic::received_bytes);
        visit("multicast_packets", &Traffic::multicast_packets);
        visit("resent_packets", &Traffic::resent_packets);
        visit("trimmed_packets", &Traffic::trimmed_packets);
        visit("late_packets", &Traffic::late_packets);
    }
};
static_assert(listed_bytes<Traffic>() == sizeof(Traffic));

}  // namespace tailcut
