#include "protocol/pacing.hpp"

#include <algorithm>
#include <cmath>

namespace tailcut {
namespace {

constexpr double kSecond = 1e9;
// In flight before anything is known: as TCP (RFC 6928), but what all senders together put into one port is a few dozen.
constexpr Rank kFirstPackets = 10, kFirstInPort = 40;
constexpr Duration kAssumedRtt = kMillisecond;
constexpr Duration kQuantum = kMillisecond / 2;
constexpr std::uint32_t kMostQuantumBytes = 60 * 1024;  // what one segmented send can take

// The queue that a sender aims at: what 48 kB take at its own rate, but at most 2 ms, which is a third of a switch port
// of 150 kB at 200 Mbit/s, or on slow links 4 packets; and not less than a quarter of the round trip, in which it
// cannot react.
constexpr double kTargetBytes = 48 * 1024, kTargetPackets = 4;
constexpr Duration kTarget = 2 * kMillisecond, kMostTarget = 8 * kMillisecond;
constexpr Duration kLeastTarget = 50 * kMicrosecond;
constexpr Duration kForgottenCap = 1000 * kMillisecond;
// A queue grows and drains steadily; what jumps more from one FEEDBACK to the next are hosts that do not get to run. The
// target rises above such jumps, or a busy host would look like a full queue.
constexpr Duration kJumps = 3, kMostJumps = 20 * kMillisecond;

constexpr Duration kBasePeriod = 10 * 1000 * kMillisecond;   // paths change: an older minimum is forgotten
constexpr double kCongestiveLoss = 0.05, kHeavyLoss = 0.15;  // a lossy link is not a full one
constexpr double kLossPackets = 200;                         // over which loss is averaged
constexpr double kGain = 0.25;      // of the rate, for a queue of nothing or of twice the target
constexpr double kYield = 0.5;      // towards equal shares: the power of their ratio
constexpr double kMostDrop = 0.5;   // of the rate at once
constexpr int kCrowdedRounds = 10;  // with a queue that halving the rate does not drain

}  // namespace

RateControl::RateControl(std::uint32_t packet_bytes, Rank rivals)
    : packet_bytes_(packet_bytes),
      start_bytes_(packet_bytes_ *
                   std::clamp(kFirstInPort / std::max(1, int{rivals}), 2, int{kFirstPackets})),
      rate_(start_bytes_ / static_cast<double>(kAssumedRtt) * kSecond) {}

// Without FEEDBACK the rate is halved, not the sending stopped: that the way back is blocked says little of the way out.
std::uint64_t RateControl::most_in_flight(Time now) const {
    if (starting_) return static_cast<std::uint64_t>(start_bytes_);
    const Duration span = srtt_ + target() + std::max<Duration>(0, now - heard_at_ - srtt_) / 2;
    const double bytes = 1.25 * rate_ * static_cast<double>(span) / kSecond + 2.0 * quantum_bytes();
    return static_cast<std::uint64_t>(std::max(bytes, 4 * packet_bytes_));
}

std::uint32_t RateControl::quantum_bytes() const {
    const double bytes = rate_ * static_cast<double>(kQuantum) / kSecond;
    return static_cast<std::uint32_t>(
        std::clamp(bytes, 2 * packet_bytes_, std::max<double>(kMostQuantumBytes, 2 * packet_bytes_)));
}

Duration RateControl::target() const {
    const auto own = static_cast<Duration>(kTargetBytes / rate_ * kSecond);
    const auto few = static_cast<Duration>(kTargetPackets * packet_bytes_ / rate_ * kSecond);
    const Duration most = std::clamp(few, kTarget, kMostTarget);
    const Duration wanted =
        std::max({base_rtt_ / 4, std::min(own, most), std::min(kJumps * jumps_, kMostJumps), kLeastTarget});
    return std::min(wanted, target_cap_);
}

void RateControl::keep_base(Time now, Duration delay) {
    if (base_since_ < 0 || now - base_since_ >= kBasePeriod) {
        base_ = base_since_ < 0 ? delay : std::min(next_base_, delay);
        next_base_ = delay;
        base_since_ = now;
    }
    base_ = std::min(base_, delay);
    next_base_ = std::min(next_base_, delay);
}

void RateControl::learn(Time now, const Sample& sample) {
    heard_at_ = now;
    srtt_ = srtt_ == 0 ? sample.rtt : srtt_ + (sample.rtt - srtt_) / 8;
    base_rtt_ = base_rtt_ == 0 ? sample.rtt : std::min(base_rtt_, sample.rtt);
    keep_base(now, sample.delay);
    if (srtt_ != sample.rtt) jumps_ += (std::abs(sample.delay - delay_) - jumps_) / 16;
    delay_ = sample.delay;
    const bool first = sum_.rtt == 0;
    sum_.rtt = sample.rtt;
    sum_.delay = first ? sample.delay : std::min(sum_.delay, sample.delay);
    sum_.span += sample.span;
    if (sample.span > 0) sum_.delivered_bytes += sample.delivered_bytes;
    sum_.lost_bytes += sample.lost_bytes;
    sum_.receiver_share = sample.receiver_share;
    sum_.sender_share = sample.sender_share;
    if (sum_.span <= 0 || now - decided_at_ < (starting_ ? srtt_ : srtt_ / 2)) return;
    decide(now);
    sum_ = {};
    limited_ = false;
    decided_at_ = now;
}

void RateControl::decide(Time now) {
    queue_ = sum_.delay - base_;
    const auto bytes = static_cast<double>(sum_.delivered_bytes + sum_.lost_bytes);
    const double kept = std::max(0.0, 1 - bytes / (kLossPackets * packet_bytes_));
    recent_lost_ = kept * recent_lost_ + static_cast<double>(sum_.lost_bytes);
    recent_bytes_ = kept * recent_bytes_ + bytes;
    const double loss = recent_lost_ / std::max(recent_bytes_, kLossPackets / 2 * packet_bytes_);
    const bool overrun = loss > kHeavyLoss || (loss > kCongestiveLoss && queue_ > target() / 4);
    if (overrun) {
        target_cap_ = std::max(kLeastTarget, target() / 2);
        recent_lost_ = 0;  // answered
    } else if (target_cap_ != kNever) {
        target_cap_ = target_cap_ < kForgottenCap ? target_cap_ + target_cap_ / 32 : kNever;
    }
    // A span in which little was sent tells nothing of what the path carries.
    const double delivered =
        static_cast<double>(sum_.delivered_bytes) / static_cast<double>(sum_.span) * kSecond;
    if (limited_ && sum_.delivered_bytes > 0)
        delivered_ = delivered_ == 0 ? delivered : (delivered_ + delivered) / 2;
    const bool congested = queue_ > target() || overrun;

    if (starting_) return start_up(congested);
    if (!congested) crowded_ = competing_ = 0;
    if (competing_) return compete(now, loss);
    if (!limited_ && (!congested || now - lowered_at_ < srtt_)) return;
    lowered_at_ = now;
    if (congested && crowded_++ == 0) crowded_from_ = rate_;
    const double excess = static_cast<double>(queue_) / static_cast<double>(target()) - 1;
    const double rounds =
        std::min(1.0, static_cast<double>(now - decided_at_) / static_cast<double>(srtt_ + 1));
    const double change = std::clamp(-kGain * excess, -kMostDrop, kGain);
    const double fair = std::clamp(std::pow(sum_.receiver_share * sum_.sender_share, -kYield), 0.8, 1.25);
    const double wanted = (limited_ ? delivered_ : rate_) * (overrun ? 1 - kGain : 1 + change) * fair;
    // A rate that makes no queue is not too high, however little was there to be sent.
    rate_ = (congested || fair < 1 ? std::min(rate_, wanted) : std::max(rate_, wanted)) +
            rounds * packet_bytes_ / static_cast<double>(srtt_ + 1) * kSecond;
    competing_ = crowded_ >= kCrowdedRounds && rate_ < kMostDrop * crowded_from_;
}

void RateControl::start_up(bool congested) {
    if (!limited_ && !congested) return;
    stalled_ = delivered_ > 1.25 * best_ ? 0 : stalled_ + 1;
    best_ = std::max(best_, delivered_);
    starting_ = !congested && stalled_ < 3;
    start_bytes_ *= 2;
    if (starting_)
        rate_ = std::max(rate_, 2 * delivered_);
    else if (delivered_ > 0)
        rate_ = std::min(rate_, delivered_);
}

void RateControl::compete(Time now, double loss) {
    if (now - lowered_at_ < srtt_) return;
    lowered_at_ = now;
    const bool backing_off = loss > kCongestiveLoss;
    if (backing_off) recent_lost_ = 0;  // answered
    rate_ = backing_off ? 0.7 * rate_ : std::min(rate_ * 1.0625, 2 * delivered_ + packet_bytes_);
}

void RateControl::push_back(Time now) {
    starting_ = false;
    if (now - lowered_at_ < srtt_) return;
    lowered_at_ = now;
    rate_ = std::max(0.9 * rate_, packet_bytes_);
}

}  // namespace tailcut
