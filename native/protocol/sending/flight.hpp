// What Path and GroupPath have in common: the datagrams in flight, which share one sequence of numbers, the
// pace at which they leave, the round trip, and when to ask for an answer that does not come.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "base/types.hpp"
#include "codec/packet_limits.hpp"
#include "protocol/sending/arrivals.hpp"
#include "protocol/sending/op_counts.hpp"
#include "protocol/sending/pacing.hpp"
#include "protocol/sending/parcel.hpp"
#include "wire/header.hpp"

namespace tailcut {

struct PeerSettings {
    std::uint32_t window_bytes = 0;  // our share of its socket buffer
    std::uint64_t pool_bytes = 0;    // its room for ops that it has not reached
    codec::PacketLimits limits;      // of packets on the path to it
    bool paced = false;              // a network lies in between, which a full window would flood
};

// The kernel charges a datagram more than its bytes; at most this much more was measured.
inline constexpr std::uint32_t kDatagramOverheadBytes = 1536;

// A reply is wanted four times per full flight, but at least once per 128 packets and at most once per 6,
// which keeps FEEDBACK below 2 % of the bytes.
inline constexpr std::uint32_t kLeastAskPackets = 6, kMostAskPackets = 128;

inline Duration from_us(std::uint32_t difference) {
    return Duration{static_cast<std::int32_t>(difference)} * kMicrosecond;
}

// How long an answer takes, without the time that the receiver waited before it answered.
class RoundTrip {
public:
    // Returns the round trip of this FEEDBACK.
    Duration learn(Time now, const wire::Header& feedback) {
        const Duration held = from_us(feedback.stamp_us - feedback.arrival_us);
        const Duration rtt = from_us(clock_us(now) - feedback.echo_us) - held;
        if (rtt >= 0 && held >= 0) smooth_ = smooth_ == 0 ? rtt : smooth_ + (rtt - smooth_) / 8;
        return rtt;
    }
    Duration smooth() const { return smooth_; }  // 0: not known
    // A packet that has not come is lost if a packet sent this much later has come.
    std::uint32_t patience_us() const {
        return static_cast<std::uint32_t>(std::max(kMillisecond, smooth_ / 4) / kMicrosecond);
    }

private:
    Duration smooth_ = 0;
};

// What a FEEDBACK says of the path's queues. The caller adds what came and what was lost.
inline RateControl::Sample sample_of(const wire::Header& feedback, Duration rtt) {
    RateControl::Sample sample;
    sample.rtt = std::max<Duration>(rtt, 1);
    sample.delay = from_us(feedback.delay_us);
    if (feedback.share > 0) sample.receiver_share = feedback.share / 256.0;
    return sample;
}

// When to ask for an answer: after a while, and ever more rarely.
class ProbeTimer {
public:
    static constexpr Duration kFloor = 2 * kMillisecond, kCeiling = 100 * kMillisecond;

    Time at() const { return at_; }
    void arm(Time now, Duration first) {
        if (at_ != kNever) return;
        after_ = after_ == 0 ? std::clamp(first, kFloor, kCeiling) : std::min(2 * after_, kCeiling);
        at_ = now + after_;
    }
    void rang() { at_ = kNever; }  // armed again if nothing has changed by then
    void answered() { at_ = kNever, after_ = 0; }

private:
    Time at_ = kNever;
    Duration after_ = 0;
};

// Datagrams leave at a rate, several at once.
class Departures {
public:
    // The earliest time for the next datagram; `now` if it may go at once.
    Time next(Time now, double bytes_per_s, std::uint32_t quantum_bytes) {
        const Duration quantum = time_of(quantum_bytes, bytes_per_s);
        due_ = std::max(due_, now - quantum);  // at most a quantum of unused time is kept
        return due_ <= now ? now : due_ + quantum / 2;
    }
    void charge(std::uint64_t bytes, double bytes_per_s) { due_ += time_of(bytes, bytes_per_s); }
    void refund(std::uint64_t bytes, double bytes_per_s) { due_ -= time_of(bytes, bytes_per_s); }

private:
    static Duration time_of(std::uint64_t bytes, double bytes_per_s) {
        return static_cast<Duration>(static_cast<double>(bytes) / bytes_per_s * 1e9);
    }
    Time due_ = 0;  // when everything sent so far would have left at the rate
};

// `Waiting` says which receivers have not settled a packet yet; none() says that all have.
template <typename Waiting>
class Flight {
public:
    struct Packet {
        std::uint32_t stamp_us = 0, bytes = 0;
        bool landed = false;  // no longer takes credit
        Waiting waiting;
        Parcel parcel;
    };

    explicit Flight(const PeerSettings& settings)
        : window_bytes(settings.window_bytes),
          packet_bytes(static_cast<std::uint32_t>(wire::kHeaderBytes) + settings.limits.payload_bytes) {}

    const std::uint32_t window_bytes, packet_bytes;

    bool empty() const { return count_ == 0; }
    bool landed() const { return used_ == 0; }  // nothing takes credit
    std::uint64_t bytes() const { return bytes_; }
    std::uint32_t unasked_bytes() const { return unasked_; }  // sent since a reply was last wanted
    // Whether there is credit for a full packet, or for a whole shard if that is smaller.
    bool has_credit(std::uint64_t shard_bytes) const {
        const std::uint64_t bytes = std::min<std::uint64_t>(packet_bytes, wire::kHeaderBytes + shard_bytes);
        return used_ == 0 ||
               (used_ + bytes + kDatagramOverheadBytes <= window_bytes && count_ < wire::kMostInFlight);
    }
    bool awaits(Seq seq) const { return by_op_.any(seq); }  // some packet of this op is not settled by all

    void stamp(Time now, wire::Header& header) const {
        header.stamp_us = std::max(1u, clock_us(now));  // 0 in an echo means that nothing was received yet
        header.number = number_ + (header.type == wire::Type::kData);
    }
    void push(const wire::Header& header, const Parcel& parcel, std::uint32_t bytes, const Waiting& waiting) {
        if (count_ == ring_.size()) grow();
        number_ = header.number;
        ++count_;
        at(number_) = {header.stamp_us, bytes, false, waiting, parcel};
        used_ += bytes + kDatagramOverheadBytes;
        bytes_ += bytes;
        unasked_ = header.flags & wire::kReplyWanted ? 0 : unasked_ + bytes;
        by_op_.add(parcel.seq);
    }
    // The latest packet was not sent after all. Returns its bytes.
    std::uint32_t pop() {
        Packet& latest = at(number_);
        land(latest);
        by_op_.remove(latest.parcel.seq);
        --count_;
        --number_;
        unasked_ = kMostAskPackets * packet_bytes;  // it may have asked
        return latest.bytes;
    }
    void land(Packet& packet) {
        if (std::exchange(packet.landed, true)) return;
        used_ -= packet.bytes + kDatagramOverheadBytes;
        bytes_ -= packet.bytes;
    }
    // Packets that were sent before this time have long left the receiver's socket, whatever became of them.
    void land_before(Time at) {
        const std::uint32_t at_us = clock_us(at);
        for (std::uint32_t k = 0; k < count_ && after(at_us, this->at(oldest() + k).stamp_us); ++k)
            land(this->at(oldest() + k));
    }
    // All receivers have settled the packet.
    void done(Packet& packet) {
        land(packet);
        by_op_.remove(packet.parcel.seq);
    }
    // Called after packets may have been done.
    void shrink() {
        while (count_ > 0 && at(oldest()).waiting.none()) --count_;
    }

    template <typename Visit>
    void for_each(Visit visit) {
        for (std::uint32_t k = 0; k < count_; ++k) visit(at(oldest() + k));
    }

    bool knows(const wire::Header& feedback) const {  // it does not speak of a number that we never sent
        return feedback.echo_us != 0 && distance(feedback.latest, number_) >= 0;
    }
    // Calls visit(packet, came), latest packet first, for each packet that this FEEDBACK shows to have come
    // or to be lost, if open(packet). One that came trimmed and is wanted whole is marked so.
    template <typename Open, typename Visit>
    void settle(const wire::Header& feedback, std::span<const std::byte> report, std::uint32_t patience_us,
                Open open, Visit visit) {
        // A packet is lost if this many later numbers came before it (RFC 9002).
        constexpr int kReordered = 3;
        int later = 0;
        for (std::int32_t k = 0; k <= distance(oldest(), feedback.latest); ++k) {
            const std::uint32_t number = feedback.latest - static_cast<std::uint32_t>(k);
            Packet& packet = at(number);
            const auto [came, cut] = Arrivals::fate(feedback, report, number);
            later += came;
            if (!open(packet)) continue;
            packet.parcel.cut = cut && packet.parcel.stage == wire::Stage::kGather;
            const bool lost =
                !came && (later >= kReordered || after(feedback.echo_us, packet.stamp_us + patience_us));
            if (came || lost) visit(packet, came);
        }
    }

private:
    Packet& at(std::uint32_t number) { return ring_[number % ring_.size()]; }  // of a packet in flight
    std::uint32_t oldest() const { return number_ - count_ + 1; }
    void grow() {
        std::vector<Packet> larger(std::max<std::size_t>(16, 2 * ring_.size()));
        for (std::uint32_t k = 0; k < count_; ++k) larger[(oldest() + k) % larger.size()] = at(oldest() + k);
        ring_ = std::move(larger);
    }

    // Packets from oldest() to number_, by number modulo the size, which is a power of two.
    std::vector<Packet> ring_;
    std::uint32_t number_ = 0;  // of the last packet sent
    std::uint32_t count_ = 0;
    OpCounts by_op_;           // packets of each op that some receiver has not settled
    std::uint32_t used_ = 0;   // of the window
    std::uint64_t bytes_ = 0;  // the same without overhead
    std::uint32_t unasked_ = 0;
};

}  // namespace tailcut
