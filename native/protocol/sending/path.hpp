// The way from this rank to another: what is in flight on it, what was lost, and when more may be sent.
//
// Credit: each sender has a fixed share of a receiver's socket buffer (window_bytes). A sender keeps what it
// has in flight, counted as the kernel counts it, within its share and within what the pace allows. FEEDBACK
// says which numbers came and so settles packets as delivered or lost. When nothing comes back, a probe asks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "base/types.hpp"
#include "protocol/sending/flight.hpp"
#include "protocol/sending/pacing.hpp"
#include "protocol/sending/parcel.hpp"
#include "wire/header.hpp"

namespace tailcut {

// Each sender's share of a socket buffer for which the kernel reports `buffer_bytes`. Measured: nothing is
// dropped while what is in flight, with overhead, stays within 0.7 of it. The rest is for FEEDBACK.
inline std::uint32_t credit_window_bytes(std::uint32_t buffer_bytes, Rank ranks) {
    return static_cast<std::uint32_t>(0.7 * buffer_bytes / std::max(1, ranks - 1));
}

class Path {
public:
    Path(const PeerSettings& settings, Rank rivals);  // rivals: senders to the same receiver

    // ---- sending
    // The earliest time for a packet of a shard of this size: `now` if it may go at once, kNever if FEEDBACK
    // must come first. `deaf`: nobody is heard, because something blocks our own port. What was sent is then taken to
    // have left the receiver's socket after a round trip: the way out is not blocked, and others wait for us.
    Time clear_at(Time now, std::uint64_t shard_bytes, bool deaf);
    void stamp(Time now, wire::Header& header);  // sets number, stamp and whether a reply is wanted
    void sent(const wire::Header& header, const Parcel& parcel, std::uint32_t bytes);
    void starved() { rate_.starved(); }  // there is nothing to send to it
    // The latest packet was not sent after all: our own host's queue is full.
    void unsent(Time now);

    // ---- what became of it
    // `mean_rate`: over this sender's paths, bytes/s. delivered(parcel) is called for each contribution that came.
    template <typename Delivered>
    void settle(Time now, const wire::Header& feedback, std::span<const std::byte> report, double mean_rate,
                Delivered delivered);
    LostParcels& lost() { return lost_; }  // lost, and not sent again yet
    const LostParcels& lost() const { return lost_; }
    bool in_flight() const { return !flight_.landed(); }
    bool idle() const { return flight_.landed() || !paced_ || rate_.idle(); }
    bool awaits(Seq seq) const { return flight_.awaits(seq) || lost_.any(seq); }

    ProbeTimer probe;
    // Armed when the path is blocked or the last packet has been sent. The first wait is that of a tail loss
    // probe (RFC 8985).
    void arm_probe(Time now) { probe.arm(now, 2 * rtt()); }

    Duration rtt() const { return round_trip_.smooth(); }
    const RateControl& rate() const { return rate_; }
    std::uint64_t sent_packets() const { return sent_packets_; }
    std::uint64_t lost_packets() const { return lost_packets_; }
    std::uint64_t delivered_bytes() const { return delivered_bytes_; }
    // How long anything was in flight, until now.
    Duration busy(Time now) const { return busy_ + (in_flight() ? now - busy_since_ : 0); }

private:
    struct Open {  // whether the one receiver has not settled the packet
        bool open = true;
        bool none() const { return !open; }
    };

    const bool paced_;
    Flight<Open> flight_;
    RateControl rate_;
    std::uint64_t most_in_flight_ = 0;  // as of the last packet
    Departures departures_;
    RoundTrip round_trip_;
    std::uint32_t arrival_us_ = 0;  // of the last FEEDBACK that was used
    bool arrival_known_ = false;
    LostParcels lost_;
    std::uint64_t sent_packets_ = 0, lost_packets_ = 0, delivered_bytes_ = 0;
    Duration busy_ = 0;
    Time busy_since_ = 0;
};

template <typename Delivered>
void Path::settle(Time now, const wire::Header& feedback, std::span<const std::byte> report, double mean_rate,
                  Delivered delivered) {
    if (!flight_.knows(feedback)) return;
    const Duration busy = this->busy(now);
    RateControl::Sample sample = sample_of(feedback, round_trip_.learn(now, feedback));
    if (mean_rate > 0) sample.sender_share = rate_.bytes_per_s() / mean_rate;
    flight_.settle(
        feedback, report, round_trip_.patience_us(), [](const auto& packet) { return packet.waiting.open; },
        [&](auto& packet, bool came) {
            (came ? sample.delivered_bytes : sample.lost_bytes) += packet.bytes;
            if (!came || packet.parcel.cut) lost_.add(packet.parcel);
            if (!came) {
                ++lost_packets_;
            } else if (packet.parcel.stage == wire::Stage::kScatter) {
                delivered(packet.parcel);
            }
            packet.waiting.open = false;
            flight_.done(packet);
        });
    flight_.shrink();
    if (!in_flight()) busy_ = busy;
    delivered_bytes_ += sample.delivered_bytes;
    probe.answered();

    const std::uint32_t before_us = std::exchange(arrival_us_, feedback.arrival_us);
    if (std::exchange(arrival_known_, true))
        sample.span = std::max<Duration>(0, from_us(arrival_us_ - before_us));
    if (paced_) rate_.learn(now, sample);
}

}  // namespace tailcut
