// A network of hosts on one switch, in virtual time: what becomes of packets, and when. It knows their sizes
// and nothing of their content.
//
//   source's NIC (rate) -> delay + jitter [-> the WAN between two sites]
//   -> the switch: partitions, loss, trimming
//   -> the destination's port (queue, rate), which background bursts use too [-> cores that all hosts share]
//   -> the destination
//
// Host h is behind port h, and so is its neighbour, host h + hosts(): somebody else on the same links. Packets
// of neighbours have no fate in the record, and do not keep a simulation going.
//
// It owns the clock: its user sends packets and sets alarms, and is told what happens, one event after
// another. Everything random is a function of the seed: one seed, one history.
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
    std::vector<Rank> side;  // cut off from all other hosts, both ways
};

// From `at` on, the links of one host, or of all, have their rate multiplied by these factors.
struct RateChange {
    static constexpr Rank kAll = 0xFFFF;
    Time at;
    Rank host;
    double uplink_factor, downlink_factor;  // above 0
};

// Background traffic into every port: the time from one burst to the next is gap_min plus an exponential time.
struct Bursts {
    std::uint64_t bytes = 0;  // bytes of a burst; 0: no bursts
    // Rate at which a burst reaches the port; 0: all of it at once, as from many hosts.
    double bytes_per_s = 0;
    std::uint32_t packet_bytes = 1500;
    Duration gap_min = 0, gap_mean = 0;
};

// The exponential part of the gap before a burst, in units of its mean. It has an address, port and burst, so that
// bursts do not depend on what else is sent. The testbed draws its bursts here, too.
double burst_draw(std::uint64_t seed, Rank port, std::uint64_t burst);

// TCP flows of other people, between neighbours (neighbours.hpp).
struct NeighbourFlows {
    std::uint64_t flow_bytes = 0;  // 0: there are none
    Duration gap_mean = 0;         // from the end of a flow to the next one into the same port
    std::uint32_t segment_bytes = 1448, header_bytes = 32;
};

// Gilbert-Elliott: a port is in a good or a bad state, and may change its state with every packet.
struct BurstyLoss {
    // Probabilities: from good to bad, from bad to good, and of losing a packet in the bad state.
    double enter = 0, leave = 1, loss = 1;
};

// Two sites: hosts from `second_site` on are behind a link of their own, in both directions.
struct Wan {
    Rank second_site = 0;  // 0: there is no WAN
    double bytes_per_s = 0;
    Duration delay = 0;
    double loss = 0;
    std::uint64_t queue_bytes = 0;
};

// The machine of a testbed: its links are token buckets, and all its hosts share its cores.
struct Machine {
    std::uint32_t cores = 0;         // 0: every host has its own, and packets cost no time
    Duration packet_cost = 0;        // of one core, from a packet's sender to its receiver
    std::uint64_t bucket_bytes = 0;  // what a link carries at once after a pause
};

struct NetworkSpec {
    std::uint64_t seed = 0;
    double loss = 0, duplicate = 0, corrupt = 0, trim = 0;  // probabilities per packet
    BurstyLoss bursty_loss;
    // What trimming leaves behind the header; 0: any number of bytes.
    std::uint32_t trim_to_payload_bytes = 0;
    std::uint64_t trim_above_bytes = 0;  // a port trims from this backlog on; 0: never for that reason
    Duration delay = 10 * kMicrosecond;
    Duration jitter = 0;             // uniform, added to the delay: packets overtake each other
    double bytes_per_s = 0;          // of each NIC and each switch port; 0: unlimited
    double uplink_bytes_per_s = -1;  // of each NIC, if it differs; 0: unlimited
    std::uint64_t queue_bytes = 0;   // of each switch port; 0: unlimited
    std::uint32_t frame_bytes = 0;   // what the layers below add to each packet on a link and in a queue
    std::vector<Partition> partitions;
    std::vector<RateChange> rate_changes;
    Bursts bursts;
    NeighbourFlows neighbours;
    Wan wan;
    Machine machine;
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
    // Of other people's traffic, which is not counted among the fates.
    std::uint64_t burst_packets = 0, burst_drops = 0;
    std::uint64_t neighbour_packets = 0, neighbour_drops = 0;
};

// Damage that passed the UDP checksum and that the checks of a header must catch. Payload bits are not
// flipped: nothing could catch that.
struct Damage {
    static constexpr std::uint8_t kNone = 0xFF;
    std::uint8_t at = kNone;  // the byte that is flipped
    bool cut_short = false;   // instead, the packet ends there
    explicit operator bool() const { return at != kNone; }
};

struct Packet {
    Rank source = 0, destination = 0;
    std::uint32_t bytes = 0;  // without frame_bytes; fewer than were sent if it was trimmed
    std::uint32_t tag = 0;    // the sender's label for it
    Damage damage;
};

struct Happening {
    enum class Kind : std::uint8_t { kArrived, kDropped, kAlarm };
    Kind kind = Kind::kAlarm;
    Fate fate = Fate::kDelivered;
    Packet packet;  // unless it is an alarm
    // if it is an alarm: as it was set
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

    // The round trip of the smallest packet when nobody else sends.
    Duration idle_round_trip(Rank a, Rank b) const;

    // One packet leaves the source's NIC once, and the switch puts a copy into each destination's port.
    // Returns how many packets arrive or are dropped in the end: a packet may be duplicated on its way.
    std::uint32_t send(Rank source, std::span<const Rank> destinations, std::uint32_t bytes,
                       std::uint32_t tag, bool trimmable);
    void alarm(Time at, Rank host, std::uint8_t alarm, std::uint32_t number = 0);

    // The next thing that happens; false if nothing will happen any more except other people's traffic.
    bool next(Happening& happening);

private:
    enum class Kind : std::uint8_t { kSwitch, kRoute, kWan, kPort, kSlip, kCore, kBurst, kAlarm };
    struct Event {
        Time at;
        std::uint64_t order;  // breaks ties in the order of scheduling: one seed, one history
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
        std::uint64_t order;  // among events, as if it had had one since it entered that line
        std::uint32_t next;   // in that line
    };
    // Packets in the order in which they leave. Only the first one has an event, which keeps the heap small.
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
        Time burst_at = 0;  // when the current one has begun, or the next one will
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
    bool leave_port(std::uint32_t id, Happening& happening);
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
    double chance();
    std::uint64_t framed(const Packet& packet) const {
        return std::uint64_t{packet.bytes} + spec_.frame_bytes;
    }

    const NetworkSpec spec_;
    const std::uint32_t header_bytes_;
    std::vector<Host> hosts_;
    std::array<Pipe, 2> wan_;  // to the first site, to the second
    std::vector<Time> cores_;  // when each is free
    Line on_cores_;
    std::priority_queue<Event, std::vector<Event>, Later> events_;
    std::vector<Carried> carried_;
    std::vector<std::uint32_t> free_;
    std::uint64_t order_ = 0, draws_ = 0, events_count_ = 0;
    std::uint64_t foreground_ = 0;  // packets and alarms of hosts, not of neighbours
    Time now_ = 0;
    NetworkCounters counters_;
};

}  // namespace tailcut::sim
