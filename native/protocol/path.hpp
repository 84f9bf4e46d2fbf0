// The way from this rank to another: what is in flight on it, what was lost, and when more may be sent.
//
// Credit: a receiver's socket buffer is shared out among its senders in advance (window_bytes). A sender keeps what it
// has in flight, counted as the kernel counts it, within its share, and within what the pace asks for. FEEDBACK says
// which numbers came and so settles them, delivered or lost. When nothing comes back, a probe asks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "codec/packet_limits.hpp"
#include "protocol/arrivals.hpp"
#include "protocol/op_counts.hpp"
#include "protocol/pacing.hpp"
#include "protocol/parcel.hpp"
#include "protocol/types.hpp"
#include "wire/header.hpp"

namespace tailcut {

struct PeerSettings {
    std::uint32_t window_bytes = 0;  // our share of its socket buffer
    std::uint64_t pool_bytes = 0;    // its room for ops that it has not reached
    codec::PacketLimits limits;      // of packets on the path to it
    bool paced = false;              // there is a network in between, which a full window would flood
};

// The kernel charges a datagram more than its bytes; measured at most this much more.
inline constexpr std::uint32_t kDatagramOverheadBytes = 1536;

// Each sender's share of a socket buffer of which the kernel reports `buffer_bytes`. Measured: nothing is dropped
// while what is in flight, overhead included, stays within 0.7 of it; the rest is for FEEDBACK.
inline std::uint32_t credit_window_bytes(std::uint32_t buffer_bytes, Rank ranks) {
    return static_cast<std::uint32_t>(0.7 * buffer_bytes / std::max(1, ranks - 1));
}

class Path {
public:
    static constexpr Duration kProbeFloor = 2 * kMillisecond;
    static constexpr Duration kProbeCeiling = 100 * kMillisecond;

    Path(const PeerSettings& settings, Rank rivals);  // senders to the same receiver

    // ---- sending
    // The earliest time for a packet of this cost, `now` if it may go at once; kNever: only FEEDBACK helps.
    Time clear_at(Time now, std::uint32_t cost);
    void stamp(Time now, wire::Header& header);  // number, stamp and whether a reply is wanted
    void sent(const wire::Header& header, const Parcel& parcel, std::uint32_t bytes);
    void starved() { rate_.starved(); }  // there is nothing to send to it
    void unsent(Time now);               // the latest one after all was not: the own host's queue is full

    // ---- what became of it
    // `mean_rate`: of this sender's paths, bytes/s.
    void settle(Time now, const wire::Header& feedback, std::span<const std::byte> missing, double mean_rate);
    std::vector<Parcel>& lost() { return lost_; }  // found since; the endpoint takes them
    bool in_flight() const { return used_ > 0; }
    bool idle() const { return used_ == 0 || !paced_ || rate_.idle(); }
    bool awaits(Seq seq) const;  // something of this op is in flight, or found lost and not taken

    Time probe_at = kNever;
    void arm_probe(Time now);  // blocked, or the last word: ask in a while, and ever more rarely

    Duration rtt() const { return rtt_; }
    const RateControl& rate() const { return rate_; }
    std::uint64_t sent_packets() const { return sent_packets_; }
    std::uint64_t lost_packets() const { return lost_packets_; }

private:
    struct InFlight {
        std::uint32_t stamp_us = 0, bytes = 0;
        bool settled = false;
        Parcel parcel;
    };
    // The datagram with this number, which is in flight.
    InFlight& at(std::uint16_t number) { return ring_[number % ring_.size()]; }
    std::uint16_t oldest() const { return static_cast<std::uint16_t>(number_ - count_ + 1); }
    void grow();
    void settle(InFlight& packet);
    static std::uint32_t cost_of(std::uint32_t bytes) { return bytes + kDatagramOverheadBytes; }
    Duration pace_of(std::uint64_t bytes) const {
        return static_cast<Duration>(static_cast<double>(bytes) / rate_.bytes_per_s() * 1e9);
    }

    const std::uint32_t window_bytes_, packet_bytes_;
    const bool paced_;
    RateControl rate_;
    std::vector<InFlight> ring_;  // by number modulo its size, a power of two: those from oldest() to number_
    std::uint16_t number_ = 0;    // of the last DATA sent
    std::uint32_t count_ = 0;
    OpCounts by_op_;                  // unsettled packets of each op that has any
    std::uint32_t used_ = 0;          // of the window, by what is in flight
    std::uint64_t flying_bytes_ = 0;  // the same as bytes
    std::uint32_t unasked_ = 0;       // bytes sent since a reply was last wanted
    Time due_ = 0;                    // when all that was sent so far would have left at the rate
    std::uint32_t arrival_us_ = 0;    // of the last FEEDBACK used
    bool arrival_known_ = false;
    Duration rtt_ = 0, probe_after_ = 0;
    std::vector<Parcel> lost_;
    std::uint64_t sent_packets_ = 0, lost_packets_ = 0;
};

}  // namespace tailcut
