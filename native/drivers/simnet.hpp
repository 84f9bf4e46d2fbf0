// Many endpoints in one process, on a simulated network in virtual time: every fault is a function of the
// seed.
//
//   endpoint -> the network (sim/network.hpp) -> receiver's socket buffer -> endpoint
//
// A rank that is frozen neither reads its socket nor fires timers; a dead one never does again. The program of a rank that
// hangs stands still, and its endpoint goes on.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "protocol/core.hpp"
#include "protocol/sending/path.hpp"
#include "protocol/state/state_channel.hpp"
#include "sim/host_freezes.hpp"
#include "sim/host_hangs.hpp"
#include "sim/network.hpp"

namespace tailcut {

using sim::Freeze;
using sim::Partition;
using SimFate = sim::Fate;

struct Injection {
    Time at;
    Rank destination;
    std::vector<std::byte> datagram;
};

// What the program of a rank does with blobs at a given time.
struct StateDeed {
    enum class Kind : std::uint8_t { kOffer, kWithdraw, kFetch, kCancel } kind;
    Time at;
    Rank rank;
    std::uint64_t id;
    Blob blob;                     // kOffer
    Rank server = 0;               // kFetch
    std::uint64_t most_bytes = 0;  // kFetch
    Ticket ticket = 0;             // kFetch, kCancel
};

struct SimFetched {
    Rank rank;
    Time at;
    Fetched fetched;
};

struct SimSpec : sim::NetworkSpec {
    Rank ranks = 1;
    Rank rows = 1;  // rows of a grid
    // the hosts
    std::vector<Freeze> freezes;
    std::vector<sim::Hang> hangs;
    std::vector<Injection> injections;
    std::vector<StateDeed> state_deeds;  // a rank says goodbye after its last one, and when all has come
    std::uint32_t socket_buffer_bytes = 1 << 20;
    codec::PacketLimits limits{1280, 0};
    wire::Codec codec = wire::Codec::kRaw;
    bool resend = false, paced = false;
    Seq buckets = 0;  // ops take so many buckets in turns, each with a key; 0: buckets have no keys
    std::vector<CoordRun> reliable;  // of every bucket
    bool carry = true;               // what is late for a bucket with a key enters its next op
    bool residues = false;           // so does what coding takes from it
    bool stand_in = true;            // as in Settings, and so is the next
    bool attendance = true;
    bool multicast = false;  // every rank hears that of every other, except for those in `deaf`
    std::vector<Rank> deaf;  // ranks that hear no multicast
    std::size_t pool_bytes = 1 << 24;
    Seq window_ops = 64;
    Seq first_seq = 0;
    Terms terms;
    std::vector<int> planes_by_rank;  // in place of those of the terms; empty: those of the terms
    Duration linger = 0;
    // The program: rank r enters op k compute[k][r] after it has entered op k - 1 and ended op k - depth.
    std::vector<std::vector<Duration>> compute;
    std::vector<Seq> ops_by_rank;  // how many ops each rank does before it says goodbye
    // By rank: the op before which it declares its state copied; or empty.
    std::vector<std::size_t> resync_before;
    // By op: the tag of its loss scale; or empty.
    std::vector<std::uint16_t> loss_scale_tags;
    // Ops whose results nobody applies, in order. A rank is told before it enters its next op.
    std::vector<Seq> skips;
    Seq depth = 1;
    // Policies, if there are any: the terms of an op at its entry, and what came of it.
    std::function<Terms(Rank rank, Time now, std::uint32_t bucket_len)> decide;
    std::function<void(Rank rank, Time now, const OpReport& report)> observe;
    // The epochs that a rank is to follow, if there are any; asked after each of its reports.
    std::function<std::vector<Epoch>(Rank rank, Time now, const OpReport& report)> agree;
    // Called now and then with the number of ops that have ended over all ranks; may throw.
    std::function<void(std::uint64_t ended_ops)> glance;
    bool record = false;
    bool elided = false;     // packets carry no values; only the lengths of buckets matter
    bool summaries = false;  // instead of reports, which grow with ranks² per op
};

struct SimPacket {  // one line of the record: a DATA packet that an endpoint was handed, or that was dropped
    Time at;
    SimFate fate;
    Rank source, destination;
    wire::Header header;
    std::uint32_t payload_bytes;
    bool damaged;
};

// A report in a few numbers: sums over all ranks, in coordinates unless stated otherwise.
struct OpSummary {
    Rank rank = 0;
    Ticket op = 0;
    Time entered_at = 0, closed_at = 0, ended_at = 0;  // closed: SCATTER of the own shard
    // Contributions to the own shard, over all ranks together.
    std::uint64_t scatter_coords = 0, scatter_missing = 0;
    std::uint64_t gather_missing = 0, gather_empty = 0;
    std::uint64_t column_coords = 0, column_missing = 0;  // in a grid: of the sums of rows
    std::uint64_t sent_packets = 0, sent_bytes = 0, received_packets = 0, trimmed_packets = 0;
    std::uint64_t late_coords = 0;  // as in OpReport

    template <typename Visit>
    static constexpr void visit_fields(Visit&& visit) {
        visit("rank", &OpSummary::rank);
        visit("op", &OpSummary::op);
        visit("entered_at_ns", &OpSummary::entered_at);
        visit("closed_at_ns", &OpSummary::closed_at);
        visit("ended_at_ns", &OpSummary::ended_at);
        visit("scatter_coords", &OpSummary::scatter_coords);
        visit("scatter_missing", &OpSummary::scatter_missing);
        visit("gather_missing", &OpSummary::gather_missing);
        visit("gather_empty", &OpSummary::gather_empty);
        visit("column_coords", &OpSummary::column_coords);
        visit("column_missing", &OpSummary::column_missing);
        visit("sent_packets", &OpSummary::sent_packets);
        visit("sent_bytes", &OpSummary::sent_bytes);
        visit("received_packets", &OpSummary::received_packets);
        visit("trimmed_packets", &OpSummary::trimmed_packets);
        visit("late_coords", &OpSummary::late_coords);
    }
};
OpSummary summary_of(Rank rank, const OpReport& report);

struct SimResult {
    std::vector<std::vector<OpReport>> reports;  // by rank, in the order of ending
    std::vector<std::vector<OpReport>> served;   // by rank: as an owner, in ops that it has not entered
    std::vector<std::vector<OpReport>> open;     // by rank: of ops that had not ended
    std::vector<OpSummary> summaries;            // of all ranks, in the order of ending
    std::vector<Counters> counters;
    std::vector<Time> closed_at;  // by rank: end of its linger
    sim::NetworkCounters network;
    std::uint64_t events = 0;
    Time ended_at = 0;
    std::vector<SimPacket> record;
    std::vector<SimFetched> fetched;                    // in the order of ending
    std::vector<std::map<Rank, std::uint64_t>> wanted;  // by rank: what others wanted at the end, by rank
};

// buckets[k][r]: the bucket of rank r in its op k, overwritten with the result.
SimResult simulate(const SimSpec& spec, const std::vector<std::vector<std::span<float>>>& buckets);

}  // namespace tailcut
