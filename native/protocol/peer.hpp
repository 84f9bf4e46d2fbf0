// What an endpoint knows of one other rank: how far it is, and the credit between the two.
//
// Credit: a receiver's socket buffer is shared out among its senders in advance (window_bytes). A sender keeps
// what it has in flight within its window; FEEDBACK echoes the latest stamp received and so settles everything
// sent up to it, delivered or lost. When nothing comes back, a probe asks; its stamp settles what was lost.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "codec/packet_limits.hpp"
#include "protocol/types.hpp"

namespace tailcut {

struct PeerSettings {
    std::uint32_t window_bytes = 0;  // our share of its socket buffer
    std::uint64_t pool_bytes = 0;    // its room for ops that it has not reached
    codec::PacketLimits limits;      // of packets on the path to it
};

// The kernel charges a datagram more than its bytes; measured at most this much more.
inline constexpr std::uint32_t kDatagramOverheadBytes = 1536;

// Each sender's share of a socket buffer of which the kernel reports `buffer_bytes`. Measured: nothing is dropped
// while what is in flight, overhead included, stays within 0.7 of it; the rest is for FEEDBACK.
inline std::uint32_t credit_window_bytes(std::uint32_t buffer_bytes, Rank ranks) {
    return static_cast<std::uint32_t>(0.7 * buffer_bytes / std::max(1, ranks - 1));
}

// Serial-number order (RFC 1982) of wrapping 32-bit stamps.
constexpr bool after(std::uint32_t a, std::uint32_t b) { return static_cast<std::int32_t>(a - b) > 0; }

class Peer {
public:
    static constexpr Duration kProbeFloor = 2 * kMillisecond;
    static constexpr Duration kProbeCeiling = 100 * kMillisecond;

    explicit Peer(const PeerSettings& settings) : settings(settings) {}

    const PeerSettings settings;

    // progress
    Seq entered = 0;       // ops it is known to have entered
    Seq told_entered = 0;  // our own progress, as far as we have told it
    Seq served_below = 0;  // ops below this have nothing left to send to it
    bool gone = false;     // said goodbye: enters no op from `gone_seq` on
    Seq gone_seq = 0;
    bool left(Seq seq) const { return gone && seq >= gone_seq; }

    // what to say next
    bool ready = false;  // in the endpoint's queue of peers with something to say
    bool feedback_due = false, probe_due = false, goodbye_due = false, goodbye_heard = false;
    Time probe_at = kNever;

    bool has_credit(std::uint32_t cost) const { return used_ == 0 || used_ + cost <= settings.window_bytes; }

    std::uint32_t next_stamp(Time now) {
        const auto clock = static_cast<std::uint32_t>(now / kMicrosecond);
        stamp_ = stamp_ == 0 || after(clock, stamp_) ? clock : stamp_ + 1;
        if (stamp_ == 0) stamp_ = 1;  // 0: nothing sent, and in an echo nothing received yet
        return stamp_;
    }

    void sent(std::uint32_t stamp, std::uint32_t cost) {
        if (count_ == flight_.size()) grow();
        flight_[(head_ + count_++) % flight_.size()] = {stamp, cost};
        used_ += cost;
    }
    void unsent() { used_ -= flight_[(head_ + --count_) % flight_.size()].cost; }

    void settle(Time now, std::uint32_t echo) {
        if (echo == 0 || after(echo, stamp_)) return;  // a stamp we never sent
        while (count_ > 0 && !after(flight_[head_].stamp, echo)) {
            used_ -= flight_[head_].cost;
            head_ = (head_ + 1) % flight_.size();
            --count_;
        }
        const auto sample = static_cast<std::uint32_t>(now / kMicrosecond) - echo;
        if (static_cast<std::int32_t>(sample) >= 0) {
            const Duration rtt = Duration{sample} * kMicrosecond;
            rtt_ = rtt_ == 0 ? rtt : rtt_ + (rtt - rtt_) / 8;
        }
        probe_at = kNever;
        probe_after_ = 0;
    }

    // Blocked: ask in a while, and ever more rarely.
    void arm_probe(Time now) {
        if (probe_at != kNever) return;
        const Duration first = std::clamp(4 * rtt_, kProbeFloor, kProbeCeiling);
        probe_after_ = probe_after_ == 0 ? first : std::min(2 * probe_after_, kProbeCeiling);
        probe_at = now + probe_after_;
    }

    // Receiving: remember the latest stamp; true when enough has come that the peer should hear of it.
    void heard(std::uint32_t stamp) {
        if (latest_ == 0 || after(stamp, latest_)) latest_ = stamp;
    }
    bool received(std::uint32_t cost, std::uint32_t own_window_bytes) {
        unreported_ += cost;
        return 2 * unreported_ >= own_window_bytes;
    }
    std::uint32_t report_latest() {
        unreported_ = 0;
        return latest_;
    }
    Duration rtt() const { return rtt_; }

private:
    struct InFlight {
        std::uint32_t stamp, cost;
    };
    void grow() {
        std::vector<InFlight> larger(std::max<std::size_t>(8, 2 * flight_.size()));
        for (std::size_t k = 0; k < count_; ++k) larger[k] = flight_[(head_ + k) % flight_.size()];
        flight_ = std::move(larger);
        head_ = 0;
    }

    std::vector<InFlight> flight_;  // a ring, oldest at head_
    std::size_t head_ = 0, count_ = 0;
    std::uint32_t used_ = 0;        // bytes of the window in flight
    std::uint32_t stamp_ = 0;       // the last one sent
    std::uint32_t latest_ = 0;      // the latest one received
    std::uint32_t unreported_ = 0;  // bytes received since the last FEEDBACK
    Duration rtt_ = 0, probe_after_ = 0;
};

}  // namespace tailcut
