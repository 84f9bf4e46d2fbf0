// A simulated network in virtual time: many endpoints in one process, every fault a function of the seed.
//
//   endpoint -> sender's NIC (rate) -> delay + jitter -> receiver's switch port (rate, queue) -> faults
//            -> receiver's socket buffer -> endpoint
//
// A rank that is frozen neither reads its socket nor fires timers; a dead one never does again.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <queue>
#include <span>
#include <vector>

#include "protocol/endpoint.hpp"

namespace tailcut {

struct Freeze {
    Rank rank;
    Time from, until;  // until == kNever: dead
};
struct Partition {
    Time from, until;
    std::vector<Rank> side;  // cut off from all the others, both ways
};
struct Injection {
    Time at;
    Rank destination;
    std::vector<std::byte> datagram;
};

struct SimSpec {
    Rank ranks = 1;
    std::uint64_t seed = 0;
    // the network
    double loss = 0, duplicate = 0, corrupt = 0, trim = 0;  // probabilities per packet
    std::uint32_t trim_to_payload_bytes = 0;                // what trimming leaves; 0: anything
    Duration delay = 10 * kMicrosecond;
    Duration jitter = 0;            // uniform on top of the delay: packets overtake each other
    double bytes_per_s = 0;         // of each NIC and each switch port; 0: unlimited
    std::uint64_t queue_bytes = 0;  // of each switch port; 0: unlimited
    std::vector<Freeze> freezes;
    std::vector<Partition> partitions;
    std::vector<Injection> injections;
    // the hosts
    std::uint32_t socket_buffer_bytes = 1 << 20;
    codec::PacketLimits limits{1280, 0};
    wire::Codec codec = wire::Codec::kRaw;
    bool resend = false, paced = false;
    std::size_t pool_bytes = 1 << 24;
    Seq window_ops = 64;
    Seq first_seq = 0;
    Terms terms;
    std::vector<int> planes_by_rank;  // instead of those of the terms; or none
    Duration linger = 0;
    // the program: rank r enters op k compute[k][r] after it has entered op k - 1 and finished op k - depth
    std::vector<std::vector<Duration>> compute;
    std::vector<Seq> ops_by_rank;  // how many ops each rank does before it says goodbye
    std::vector<std::size_t>
        resync_before;  // by rank: the op before which it declares its state copied; or none
    Seq depth = 1;
    bool record = false;
};

enum class SimFate : std::uint8_t {
    kDelivered,
    kLost,
    kQueueDrop,
    kSocketDrop,
    kPartitioned,
    kDeadHost,
    kCount
};

struct SimPacket {  // one line of the record: a DATA packet that an endpoint was handed, or that was dropped
    Time at;
    SimFate fate;
    Rank source, destination;
    wire::Header header;
    std::uint32_t payload_bytes;
    bool damaged;
};

struct SimResult {
    std::vector<std::vector<OpReport>> reports;  // by rank, in the order of ending
    std::vector<Counters> counters;
    std::vector<Time> closed_at;  // by rank: end of its linger
    std::array<std::uint64_t, static_cast<std::size_t>(SimFate::kCount)> fates{};
    std::uint64_t events = 0;
    Time ended_at = 0;
    std::vector<SimPacket> record;
};

// buckets[k][r]: the bucket of rank r in its op k, overwritten with the result.
SimResult simulate(const SimSpec& spec, const std::vector<std::vector<std::span<float>>>& buckets);

}  // namespace tailcut
