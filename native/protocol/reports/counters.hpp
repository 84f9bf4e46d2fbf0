// What an endpoint has counted since it was made.
#pragma once

#include <array>
#include <cstdint>

#include "protocol/reports/fields.hpp"
#include "protocol/reports/traffic.hpp"
#include "wire/header.hpp"

namespace tailcut {

struct Counters {
    Traffic traffic;  // of all packets, not only of DATA
    std::uint64_t feedback_packets = 0, feedback_bytes = 0, probe_packets = 0;
    std::uint64_t lost_packets = 0;    // DATA found lost
    std::uint64_t evicted_shards = 0;  // owned shards evicted because the pool was full
    std::uint64_t evicted_means = 0;   // means evicted before every peer had them
    // Rule 9, in coordinates: late contributions that entered a later mean, late means that entered a later
    // result, and what was late and could not be used any more.
    std::uint64_t carried_contributions = 0, carried_means = 0, dropped_late_coords = 0;
    std::uint64_t evicted_late = 0;    // ops whose late parts were given up because the pool was full
    std::uint64_t split_verdicts = 0;  // ops that others skipped for an Inf or a NaN, heard of too late
    std::uint64_t state_packets = 0, state_bytes = 0;  // sent: requests for blobs, and answers
    std::array<std::uint64_t, wire::kRejectReasons> rejected{};

    template <typename Visit>
    static constexpr void visit_fields(Visit&& visit) {
        visit("traffic", &Counters::traffic);
        visit("feedback_packets", &Counters::feedback_packets);
        visit("feedback_bytes", &Counters::feedback_bytes);
        visit("probe_packets", &Counters::probe_packets);
        visit("state_packets", &Counters::state_packets);
        visit("state_bytes", &Counters::state_bytes);
        visit("lost_packets", &Counters::lost_packets);
        visit("evicted_shards", &Counters::evicted_shards);
        visit("evicted_means", &Counters::evicted_means);
        visit("carried_contributions", &Counters::carried_contributions);
        visit("carried_means", &Counters::carried_means);
        visit("dropped_late_coords", &Counters::dropped_late_coords);
        visit("evicted_late", &Counters::evicted_late);
        visit("split_verdicts", &Counters::split_verdicts);
        visit("rejected", &Counters::rejected);
    }
};
static_assert(listed_bytes<Counters>() == sizeof(Counters));

}  // namespace tailcut
