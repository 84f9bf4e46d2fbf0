// A reliable transport like a modern TCP on the simulated network. The baselines run over it.
//
// It is meant to be neither favoured nor handicapped, so these were chosen:
//   segments      have one MSS. Every transmission has a number of its own, so that acknowledgements are
//                 never ambiguous (TCP: timestamps), and a lost retransmission is found like any other loss
//                 (RACK).
//   acks          are sent for every second segment, and at once when something is out of order and at the
//                 end of a message. They state the cumulative point and the three newest runs beyond it
//                 (SACK), and cost bytes on the way back.
//   loss          is found when three later transmissions were acknowledged; else by a tail loss probe two
//                 round trips after the last sign of life, as in Linux; else by RTO = srtt + 4 rttvar, at
//                 least 200 ms. A timeout that was wrong, because all segments were only late, is undone
//                 (Eifel).
//   rate          is CUBIC with HyStart (cubic.hpp), initial window 10, without restart after idle times:
//                 connections stay open between ops and keep their windows, as datacentres configure it. The
//                 handshake is over and has measured an idle round trip.
//   flow control  is by the receive buffer. A process that stands still does not read, while its kernel goes
//                 on acknowledging.
//   messages      are delivered in order; the send buffer is unlimited; computing costs no time.
#pragma once

#include <array>
#include <deque>
#include <functional>
#include <optional>
#include <vector>

#include "sim/cubic.hpp"
#include "sim/host_freezes.hpp"
#include "sim/network.hpp"

namespace tailcut::sim {

struct TransportSpec {
    std::uint32_t segment_bytes = 1448;
    std::uint32_t header_bytes = 32;               // TCP with timestamps, on data and on acknowledgements
    std::uint64_t receive_buffer_bytes = 6 << 20;  // Linux: the most that it tunes a socket to on its own
    double initial_window = 10;
    Duration least_rto = 200 * kMillisecond;
};

struct TransportCounters {
    std::uint64_t segments = 0, resent_segments = 0, probes = 0, timeouts = 0, acks = 0;
};

class Transport {
public:
    using FlowId = std::uint32_t;
    static constexpr std::uint8_t kAlarm = 1;  // alarms of this kind are the transport's

    // `read` is called when a message has been delivered and read; `label` is the sender's label for it.
    Transport(const TransportSpec& spec, Network& network, HostFreezes& freezes,
              std::function<void(FlowId flow, std::uint64_t label)> read);

    FlowId open(Rank source, Rank destination);
    void renew(FlowId flow);  // a new connection in its place: what it learned of the path is forgotten
    Rank destination(FlowId flow) const { return flows_[flow].destination; }
    void send(FlowId flow, std::uint64_t bytes, std::uint64_t label);

    void arrived(const Packet& packet);
    void dropped(const Packet& packet) { forget(packet.tag); }
    void on_alarm(FlowId flow);
    void thaw(Rank host);  // the host reads what has come

    const TransportCounters& counters() const { return counters_; }

private:
    using Index = std::uint64_t;  // of a segment in its flow, or of a transmission
    enum class State : std::uint8_t { kUnsent, kInFlight, kLost, kAcked };
    struct Segment {
        std::uint32_t bytes;
        State state;
        bool ends_message;
        Index number;  // of its last transmission
        Time sent_at;
    };
    struct Range {
        Index first, last;
    };
    struct Ack {
        Index expected = 0;  // all segments before this one have come
        std::array<Range, 3> beyond{};
        std::uint8_t ranges = 0;
        std::uint64_t window_bytes = 0;
        Index number = 0;  // the transmission that it answers, and when that was sent; kNever: none
        Time sent_at = kNever;
    };
    struct InFlight {
        Index number, segment;
    };
    struct Flow {
        Flow(Rank source, Rank destination, const Cubic& cubic)
            : source(source), destination(destination), cubic(cubic) {}

        Rank source, destination;
        // the sender
        Cubic cubic;
        std::deque<Segment> segments;  // from `base` on
        Index base = 0, unsent = 0;    // the first segment not acknowledged, and the first never sent
        std::deque<InFlight> transmissions;
        std::deque<Index> lost;
        Index next_number = 0, newest_acked = 0, recovery_until = 0, round_until = 0;
        std::uint64_t in_flight = 0;          // segments
        std::uint64_t outstanding_bytes = 0;  // from the cumulative point on
        std::uint64_t window_bytes = 0;       // the room at the receiver
        bool limited = false;                 // by the congestion window, when it last sent
        bool probed = false;
        Duration srtt = 0, rttvar = 0;  // at first those of the handshake
        int backoff = 0;
        std::optional<Cubic> before_timeout;  // until it is known whether the timeout was right
        Index timeout_number = 0;
        Time timer_at = kNever, alarm_at = kNever;
        // the receiver
        Index expected = 0;
        std::vector<Range> beyond;  // ascending
        Range newest{0, 0};
        std::uint32_t unacked = 0;  // segments
        std::uint64_t unread_bytes = 0;
        std::deque<std::uint64_t> labels;  // of messages that were sent and not read
        std::uint64_t unread_messages = 0;
    };
    struct Unit {  // the content of a packet
        FlowId flow;
        bool is_ack;
        Index segment, number;
        Time sent_at;
        Ack ack;
        std::uint32_t copies;
    };

    Segment& segment(Flow& flow, Index index) { return flow.segments[index - flow.base]; }
    void pump(FlowId id);
    void transmit(FlowId id, Index index);
    void on_segment(FlowId id, const Unit& unit);
    bool note(Flow& flow, Index index);
    void read_ready(FlowId id);
    void acknowledge(FlowId id, Index number, Time sent_at);
    void on_ack(FlowId id, const Ack& ack);
    std::uint64_t mark_acked(Flow& flow, Index first, Index last);
    void find_losses(Flow& flow);
    void measure(Flow& flow, const Ack& ack);
    void set_timer(FlowId id);
    void probe(FlowId id);
    void time_out(FlowId id);
    void judge_timeout(Flow& flow, const Ack& ack);
    Duration rto(const Flow& flow) const;
    static bool can_probe(const Flow& flow) {
        return !flow.probed && flow.backoff == 0 && flow.in_flight > 0;
    }
    void post(Rank from, Rank to, std::uint32_t bytes, const Unit& unit);
    void forget(std::uint32_t tag);

    const TransportSpec spec_;
    Network& network_;
    HostFreezes& freezes_;
    const std::function<void(FlowId, std::uint64_t)> read_;
    std::deque<Flow> flows_;
    std::vector<Unit> units_;
    std::vector<std::uint32_t> free_units_;
    TransportCounters counters_;
};

}  // namespace tailcut::sim
