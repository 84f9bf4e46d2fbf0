// A baseline: a collective over the reliable transport, in the same simulated network as tailcut's endpoints.
#pragma once

#include <functional>
#include <vector>

#include "sim/collective.hpp"
#include "sim/host_freezes.hpp"
#include "sim/host_hangs.hpp"
#include "sim/network.hpp"
#include "sim/transport.hpp"

namespace tailcut::sim {

struct BaselineSpec : NetworkSpec {
    Rank ranks = 1;
    Algorithm algorithm = Algorithm::kRing;
    std::uint64_t bucket_bytes = 0;
    std::uint64_t part_bytes = 256 << 10;
    TransportSpec transport;
    std::vector<Freeze> freezes;
    std::vector<Hang> hangs;
    // The program: rank r enters op k compute[k][r] after it has ended op k - 1.
    std::vector<std::vector<Duration>> compute;
    // Stop after this time without an op that ends anywhere: a rank waits for a dead one.
    Duration give_up = 60'000 * kMillisecond;
    std::function<void(std::uint64_t ended_ops)> glance;  // called now and then; may throw
};

struct BaselineOp {
    Rank rank;
    std::uint32_t op;
    Time entered_at, ended_at;

    template <typename Visit>
    static constexpr void visit_fields(Visit&& visit) {
        visit("rank", &BaselineOp::rank);
        visit("op", &BaselineOp::op);
        visit("entered_at_ns", &BaselineOp::entered_at);
        visit("ended_at_ns", &BaselineOp::ended_at);
    }
};

struct BaselineResult {
    std::vector<BaselineOp> ops;  // in the order in which they ended
    NetworkCounters network;
    TransportCounters transport;
    std::uint64_t events = 0;
    Time ended_at = 0;
};

BaselineResult simulate_baseline(const BaselineSpec& spec);

}  // namespace tailcut::sim
