// A network of hosts on one switch, in virtual time: what becomes of packets, and when. It knows their sizes and
// nothing of what is in them.
//
//   source's NIC (rate) -> delay + jitter [-> the WAN between two sites] -> the switch: partitions, loss, trimming
//   -> the destination's port (queue, rate), which bursts of other people's traffic use too -> the destination
//
// Host h is behind port h, and so is its neighbour, host + hosts(): somebody else, on the same links. What neighbours
// send is not among the fates, and does not keep a simulation going.
//
// It owns the clock: its user sends and sets alarms, and is told what happens, one thing after the other. Everything
// random is a function of the seed: one seed, one history.
#pragma once

#include <array>
#include <cstdint>
#include <queue>
#include <span>
#include <vector>

#include "base/types.hpp"
#include "sim/link.hpp"

namespace tailcut::sim {

struct Partition {
    Time from, until;
    std::vector<Rank> side;  // cut off from all the others, both ways
};

// From `at` on, the links of a host, or of all, have so many times their rate.
struct RateChange {
    static constexpr Rank kAll = 0xFFFF;
    Time at;
    Rank host;
    double uplink_factor, downlink_factor;  // above 0
};

// Other people's traffic into every port: the time between two bursts is gap_min plus an exponential one.
struct Bursts {
    std::uint64_t bytes = 0;  // of a burst; 0: there are none
    double bytes_per_s = 0;   // at which a burst reaches the port; 0: all of it at once, as from many hosts
    std::uint32_t packet_bytes = 1500;
    Duration gap_min = 0, gap_mean = 0;
};

// Other people's TCP flows, by neighbours (neighbours.hpp).
struct NeighbourFlows {
    std::uint64_t flow_bytes = 0;  // 0: there are none
    Duration gap_mean = 0;         // from the end of a flow to the next one into the same port
    std::uint32_t segment_bytes = 1448, header_bytes = 32;
};

// Gilbert-Elliott: a port is in a good or a bad state and may change with every packet.
struct BurstyLoss {
    double enter = 0, leave = 1,
           loss = 1;  // probabilities: good to bad, bad to good, of a packet in the bad state
};

// Two sites: hosts from `second_site` on are behind a link of their own, both ways.
struct Wan {
    Rank second_site = 0;  // 0: there is no WAN
    double bytes_per_s = 0;
    Duration delay = 0;
    double loss = 0;
    std::uint64_t queue_bytes = 0;
};

struct NetworkSpec {
    std::uint64_t seed = 0;
    double loss = 0, duplicate = 0, corrupt = 0, trim = 0;  // probabilities per packet
    BurstyLoss bursty_loss;
    std::uint32_t trim_to_payload_bytes = 0;  // what trimming leaves behind the header; 0: anything
    std::uint64_t trim_above_bytes = 0;  // backlog of a port from which on it trims; 0: never for that reason
    Duration delay = 10 * kMicrosecond;
    Duration jitter = 0;             // uniform on top of the delay: packets overtake each other
    double bytes_per_s = 0;          // of each NIC and each switch port; 0: unlimited
    double uplink_bytes_per_s = -1;  // of each NIC, if it is another; 0: unlimited
    std::uint64_t queue_bytes = 0;   // of each switch port; 0: unlimited
    std::uint32_t frame_bytes = 0;   // what the layers below add to each packet on a link and in a queue
    std::vector<Partition> partitions;
    std::vector<RateChange> rate_changes;
    Bursts bursts;
    NeighbourFlows neighbours;
    Wan wan;
};

enum class Fate : std::uint8_t {
    kDelivered,
    kLost,
    kQueueDrop,
    kSocketDrop,
    kPartitioned,
    kDeadHost,
    kCount
};

struct NetworkCounters {
    std::array<std::uint64_t, static_cast<std::size_t>(Fate::kCount)> fates{};
    std::uint64_t trimmed_packets = 0;
    // of other people's traffic, not among the fates
    std::uint64_t burst_packets = 0, burst_drops = 0;
    std::uint64_t neighbour_packets = 0, neighbour_drops = 0;
};

// Damage that passed the UDP checksum, of a kind that the checks of a header must catch: there is nothing to catch a
// flipped payload bit with.
struct Damage {
    static constexpr std::uint8_t kNone = 0xFF;
    std::uint8_t at = kNone;  // the byte that is flipped
    bool cut_short = false;   // or the packet ends there
    explicit operator bool() const { return at != kNone; }
};

struct Packet {
    Rank source = 0, destination = 0;
    std::uint32_t bytes = 0;  // without frame_bytes; less than was sent if it was trimmed
    std::uint32_t tag = 0;    // the sender's word for it
    Damage damage;
};

struct Happening {
    enum class Kind : std::uint8_t { kArrived, kDropped, kAlarm };
    Kind kind = Kind::kAlarm;
    Fate fate = Fate::kDelivered;
    Packet packet;  // not of an alarm
    // of an alarm, as it was set
    Rank host = 0;
    std::uint8_t alarm = 0;
    std::uint32_t number = 0;
};

class Network {
public:
    // `header_bytes` at the front of a packet are never trimmed.
    Network(const NetworkSpec& spec, Rank hosts, std::uint32_t header_bytes);

    Time now() const { return now_; }
    std::uint64_t events() const { return events_count_; }
    Rank hosts() const { return static_cast<Rank>(hosts_.size()); }
    Rank neighbour(Rank host) const { return static_cast<Rank>(host + hosts()); }
    bool is_neighbour(Rank host) const { return host >= hosts(); }
    const NetworkCounters& counters() const { return counters_; }
    void count(Fate fate) { ++counters_.fates[static_cast<std::size_t>(fate)]; }

    // Of the smallest packet, when nobody else sends.
    Duration idle_round_trip(Rank a, Rank b) const;

    // One packet leaves the source's NIC once; the switch gives a copy to each destination's port. Returns how many
    // packets arrive or are dropped in the end: a packet may be doubled on its way.
    std::uint32_t send(Rank source, std::span<const Rank> destinations, std::uint32_t bytes,
                       std::uint32_t tag, bool trimmable);
    void alarm(Time at, Rank host, std::uint8_t alarm, std::uint32_t number = 0);

    // The next thing that happens; false: nothing will any more, but for other people's traffic.
    bool next(Happening& happening);

private:
    enum class Kind : std::uint8_t { kSwitch, kRoute, kWan, kPort, kSlip, kBurst, kAlarm };
    struct Event {
        Time at;
        std::uint64_t order;  // ties in the order of scheduling: one seed, one history
        Kind kind;
        std::uint8_t alarm;
        Rank host;
        std::uint32_t number;
    };
    struct Later {
        bool operator()(const Event& a, const Event& b) const {
            return a.at != b.at ? a.at > b.at : a.order > b.order;
        }
    };
    struct Carried {
        Packet packet;
        bool trimmable;
        Time at;              // when it leaves the line that it is in
        std::uint64_t order;  // among events, as if it had one since it entered that line
        std::uint32_t next;   // in that line
    };
    // Packets in the order in which they leave. Only the first has an event, which keeps the heap small.
    struct Line {
        static constexpr std::uint32_t kEmpty = 0xFFFFFFFF;
        std::uint32_t first = kEmpty, last = kEmpty;
    };
    struct Host {  // with its neighbour
        Link nic, port;
        Line leaving, queued;
        Time slip = 0;  // trimmed packets go first: when the last of them has left the port
        bool bad = false;
        std::uint64_t bursts = 0, burst_left = 0;
    };
    struct Pipe {  // one direction of the WAN
        Link link;
        Line line;
    };

    void schedule(Time at, Kind kind, Rank host, std::uint32_t number = 0, std::uint8_t alarm = 0) {
        events_.push({at, order_++, kind, alarm, host, number});
    }
    void append(Line& line, std::uint32_t id, Time at, Kind kind, Rank host);
    std::uint32_t take(Line& line, Kind kind, Rank host);
    bool handle(const Event& event, Happening& happening);
    bool reach_switch(std::uint32_t id, Happening& happening);
    bool route(std::uint32_t id, Happening& happening);
    bool arrive(std::uint32_t id, Happening& happening);
    bool lost(Host& host);
    void trim(Carried& carried, Host& host, bool& slips);
    bool enter_wan(std::uint32_t id, Happening& happening);
    bool over(std::uint32_t id, Fate fate, Happening& happening);
    bool full(Link& link, std::uint64_t queue_bytes, std::uint64_t bytes);
    void burst(Rank host);
    void plan_burst(Rank host);
    bool cut(Rank a, Rank b) const;
    Rank port_of(Rank host) const { return is_neighbour(host) ? static_cast<Rank>(host - hosts()) : host; }
    bool in_second_site(Rank host) const { return port_of(host) >= spec_.wan.second_site; }
    double chance() { return unit(mix(spec_.seed ^ mix(draws_++))); }
    static double unit(std::uint64_t bits) { return static_cast<double>(bits >> 11) * 0x1p-53; }
    std::uint64_t framed(const Packet& packet) const {
        return std::uint64_t{packet.bytes} + spec_.frame_bytes;
    }

    const NetworkSpec spec_;
    const std::uint32_t header_bytes_;
    std::vector<Host> hosts_;
    std::array<Pipe, 2> wan_;  // to the first site, to the second
    std::priority_queue<Event, std::vector<Event>, Later> events_;
    std::vector<Carried> carried_;
    std::vector<std::uint32_t> free_;
    std::uint64_t order_ = 0, draws_ = 0, events_count_ = 0;
    std::uint64_t foreground_ = 0;  // packets and alarms of hosts, not of neighbours
    Time now_ = 0;
    NetworkCounters counters_;
};

}  // namespace tailcut::sim
