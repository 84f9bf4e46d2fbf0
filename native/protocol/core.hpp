// What a driver drives: all ops of one rank. Sans-IO: it is told the time and handed datagrams, and gives back datagrams,
// its next timer and the reports of ended ops.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "protocol/peer.hpp"
#include "protocol/report.hpp"
#include "protocol/types.hpp"
#include "protocol/values.hpp"
#include "wire/header.hpp"

namespace tailcut {

// Who hears our multicast, and the path to all of them. Without members there is none.
struct MulticastSettings {
    std::vector<Rank> members;
    PeerSettings path;  // with the least of what the members grant; pool_bytes is not looked at
};

struct Settings {
    Shape shape;
    std::uint64_t group_tag = 0;
    Seq window_ops = 64;                    // W of rule 3
    wire::Codec codec = wire::Codec::kRaw;  // of all ranks
    std::size_t pool_bytes = 0;
    std::uint32_t window_bytes = 0;  // each sender's share of our socket buffer
    Terms terms;                     // of ops that this rank has not entered
    MulticastSettings multicast;
    Seq first_seq = 0;
    bool resend = true;  // what was lost, while its stage is open
    bool record_fates = false;
    Rank rows = 1;        // more than one: a grid (grid/grid_core.hpp)
    bool elided = false;  // simulations only: packets without values
};

struct Counters {
    std::uint64_t received_packets = 0, received_bytes = 0;
    std::uint64_t sent_packets = 0, sent_bytes = 0;
    std::uint64_t multicast_packets = 0;  // of these, sent once for many
    std::uint64_t feedback_packets = 0, feedback_bytes = 0, probe_packets = 0;
    std::uint64_t lost_packets = 0, resent_packets = 0;  // DATA found lost, and sent again
    std::uint64_t late_gather_packets = 0;               // rule 9: kept out of the result
    std::uint64_t forfeited_shards = 0;                  // owned shards given up because the pool was full
    std::uint64_t dropped_history = 0;                   // means given up before every peer had them
    std::array<std::uint64_t, wire::kRejectReasons> rejected{};

    Counters& operator+=(const Counters& other);
};

class Core {
public:
    virtual ~Core() = default;

    // The local rank enters its next op. The bucket must stay valid until the report of `ticket`.
    virtual void submit(Time now, Ticket ticket, std::span<float> bucket, const Terms& terms) = 0;
    virtual void resynced() = 0;       // the state was copied from a peer: contribute again
    virtual void say_goodbye() = 0;    // enter no more ops, go on serving
    virtual void abort(Time now) = 0;  // end the ops in flight with what has arrived
    virtual void leave() = 0;          // the last word: what is not sent by now will not be
    virtual bool drained() const = 0;  // nothing left to serve, and every peer has said goodbye

    virtual void receive(Time now, std::span<const std::byte> datagram) = 0;
    virtual bool transmit(Time now, Outgoing& out) = 0;
    virtual void retract(Time now,
                         const Outgoing& out) = 0;  // not sent after all, the host is busy; newest first
    virtual Time next_timer() const = 0;
    virtual void advance(Time now) = 0;

    virtual std::vector<OpReport>& reports() = 0;  // of ended ops; the driver takes them
    virtual Counters counters() const = 0;
    virtual std::size_t pool_used_bytes() const = 0;
    virtual std::size_t memory_bytes() const = 0;
    virtual Duration rtt(Rank rank) const = 0;  // 0: not known
    virtual bool contributing() const = 0;
    virtual std::size_t in_flight() const = 0;
};

// `peers` by rank; the own entry is not used.
std::unique_ptr<Core> make_core(const Settings& settings, const std::vector<PeerSettings>& peers);
// Ranks that send to one, and itself: they share what it can take.
Rank senders_to_one(Rank ranks, Rank rows);

}  // namespace tailcut
