#include "protocol/sending/pacing.hpp"

#include <algorithm>
#include <cmath>

namespace tailcut {
namespace {

constexpr double kSecond = 1e9;
// Packets in flight before anything is known: as in TCP (RFC 6928), but all senders together put at most a
// few dozen into one port.
constexpr Rank kFirstPackets = 10, kFirstInPort = 40;
constexpr Duration kAssumedRtt = kMillisecond;
constexpr Duration kQuantum = kMillisecond / 2;
constexpr std::uint32_t kMostQuantumBytes = 60 * 1024;  // what one segmented send can take

// A sender aims at this many bytes of its own in the queue, whatever its rate. This makes shares of a port
// equal, both among tailcut's senders and with a TCP flow. All senders of a group into one port together aim
// at 96 kB, two thirds of a shallow port of 150 kB. In time this is at most 16 ms, even on slow links, and at
// least a quarter of the round trip, within which nothing can react.
constexpr double kTargetInPort = 96 * 1024, kTargetPackets = 2;
constexpr Duration kMostTarget = 16 * kMillisecond, kLeastTarget = 50 * kMicrosecond;
constexpr Duration kForgottenCap = 1000 * kMillisecond;
// Decisions until the cap has doubled. It grows slowly because probing a shallow queue costs packets.
constexpr Duration kCapRecovers = 64;
// A queue grows and drains steadily. Larger jumps from one FEEDBACK to the next come from hosts that do not
// get to run. The target rises above such jumps; otherwise a busy host would look like a full queue.
constexpr Duration kJumps = 3, kMostJumps = 20 * kMillisecond;

constexpr Duration kBasePeriod = 10 * 1000 * kMillisecond;  // paths change, so an older minimum is dropped
// Below these, loss is that of a lossy link, not of a full one.
constexpr double kCongestiveLoss = 0.05, kHeavyLoss = 0.15;
constexpr double kLossPackets = 200;  // loss is averaged over this many
constexpr double kLeastPackets = 4;   // needed for a decision: fewer arrivals say nothing about a rate
// A path that was idle this often since the last decision sends a few packets per op, and its samples never
// have a span.
constexpr int kSparseBursts = 3;
// Share of the rate by which it changes for an empty queue, or for one of twice the target.
constexpr double kGain = 0.25;
constexpr double kYield = 0.5;  // exponent of the ratio of shares when yielding towards equal ones
// The largest share of the rate that one decision takes away. After other traffic has blocked a port, what was in
// flight seems to have been delivered as slowly as that.
constexpr double kMostDrop = 0.5;

}  // namespace

RateControl::RateControl(std::uint32_t packet_bytes, Rank rivals)
    : packet_bytes_(packet_bytes),
      target_bytes_(std::max(kTargetPackets * packet_bytes, kTargetInPort / std::max(1, int{rivals}))),
      start_bytes_(packet_bytes_ *
                   std::clamp(kFirstInPort / std::max(1, int{rivals}), 2, int{kFirstPackets})),
      rate_(start_bytes_ / static_cast<double>(kAssumedRtt) * kSecond) {}

// If nobody is heard, the own port is blocked, which says nothing of the way out: the rate is halved and sending
// goes on. If others are heard, this peer's port is blocked. More would wait in it, be late there, and fill what the
// own host lets a socket have on its way to everybody.
std::uint64_t RateControl::most_in_flight(Time now, bool deaf) const {
    if (starting_) return static_cast<std::uint64_t>(start_bytes_);
    const Duration unheard = deaf ? std::max<Duration>(0, now - heard_at_ - srtt_) : 0;
    const Duration span = srtt_ + target() + unheard / 2;
    const double bytes = 1.25 * rate_ * static_cast<double>(span) / kSecond + 2.0 * quantum_bytes();
    return static_cast<std::uint64_t>(std::max(bytes, 4 * packet_bytes_));
}

std::uint32_t RateControl::quantum_bytes() const {
    const double bytes = rate_ * static_cast<double>(kQuantum) / kSecond;
    return static_cast<std::uint32_t>(
        std::clamp(bytes, 2 * packet_bytes_, std::max<double>(kMostQuantumBytes, 2 * packet_bytes_)));
}

Duration RateControl::target() const {
    const auto own = static_cast<Duration>(target_bytes_ / rate_ * kSecond);
    const Duration wanted = std::max(
        {base_rtt_ / 4, std::min(own, kMostTarget), std::min(kJumps * jumps_, kMostJumps), kLeastTarget});
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
    // While starting, the limit is what is in flight, not a rate that follows from an assumed round trip.
    if (starting_) rate_ = std::max(rate_, start_bytes_ / static_cast<double>(srtt_) * kSecond);
    if (!starting_) jumps_ += (std::abs(sample.delay - delay_) - jumps_) / 16;
    delay_ = sample.delay;
    const bool first = sum_.rtt == 0;
    sum_.rtt = sample.rtt;
    // While starting, the largest delay counts: a burst meets the queue that it makes itself with its last
    // packets. Later the least delay counts: it is the queue that stays.
    sum_.delay = first       ? sample.delay
                 : starting_ ? std::max(sum_.delay, sample.delay)
                             : std::min(sum_.delay, sample.delay);
    sum_.span += sample.span;
    sum_.delivered_bytes += sample.delivered_bytes;
    if (sample.span > 0) timed_bytes_ += sample.delivered_bytes;
    sum_.lost_bytes += sample.lost_bytes;
    sum_.receiver_share = sample.receiver_share;
    sum_.sender_share = sample.sender_share;
    const bool sparse = resumed_ >= kSparseBursts;
    if (!timed() && !(sparse && enough(sum_.delivered_bytes + sum_.lost_bytes))) return;
    if (now - decided_at_ < (starting_ ? srtt_ : srtt_ / 2)) return;
    decide(now);
    sum_ = {};
    timed_bytes_ = 0;
    resumed_ = 0;
    limited_ = false;
    decided_at_ = now;
}

bool RateControl::enough(std::uint64_t bytes) const {
    return static_cast<double>(bytes) >= kLeastPackets * packet_bytes_;
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
        target_cap_ = std::max({kLeastTarget, target() / 2, queue_ / 2});  // the queue had room for that much
        recent_lost_ = 0;                                                  // this loss has been answered
    } else if (target_cap_ != kNever) {
        target_cap_ = target_cap_ < kForgottenCap ? target_cap_ + target_cap_ / kCapRecovers : kNever;
    }
    // A span in which little was sent says nothing about what the path carries. Neither do a few packets
    // without a span, which is all that some paths send in an op; but their delay does.
    if (!timed()) srtt_ = sum_.rtt;  // few packets long ago: srtt_ still reflects an old queue
    const double delivered =
        timed() ? static_cast<double>(timed_bytes_) / static_cast<double>(sum_.span) * kSecond : 0;
    const bool full = limited_ && starved_ == 0 && timed();
    starved_ = std::max(0, starved_ - 1);
    if ((full || (limited_ && delivered > delivered_)) && timed_bytes_ > 0)
        delivered_ = delivered_ == 0 ? delivered : (delivered_ + delivered) / 2;
    const bool congested = queue_ > target() || overrun;

    if (starting_) return start_up(congested);
    if (!limited_ && (!congested || now - lowered_at_ < srtt_)) return;
    lowered_at_ = now;
    const double excess = static_cast<double>(queue_) / static_cast<double>(target()) - 1;
    const double round = static_cast<double>(srtt_ + 1);
    const double rounds = std::min(1.0, static_cast<double>(now - decided_at_) / round);
    // The queue follows the rate one round trip later, so a rate that changes faster than in two round trips
    // oscillates.
    const double gain = kGain * std::min(1.0, 2 * static_cast<double>(target()) / round);
    const double change = overrun ? -kGain : std::clamp(-gain * excess, -kMostDrop, kGain);
    const double fair = std::clamp(std::pow(sum_.receiver_share * sum_.sender_share, -kYield), 0.8, 1.25);
    const double wanted = (full ? delivered_ : rate_) * (1 + change) * fair;
    // A rate that makes no queue is not too high, however little came: a host that does not get to run
    // delivers little.
    rate_ = congested && full       ? std::max(wanted, (1 - kMostDrop) * rate_)
            : congested || fair < 1 ? std::min(rate_, wanted)
                                    : std::max(rate_, wanted);
    rate_ += rounds * packet_bytes_ / round * kSecond;
}

void RateControl::start_up(bool congested) {
    if (!limited_ && !congested) return;
    if (timed()) stalled_ = delivered_ > 1.25 * best_ ? 0 : stalled_ + 1;
    best_ = std::max(best_, delivered_);
    starting_ = !congested && stalled_ < 3;
    // What was in flight, at least, came within a round trip, even if there was no more to send.
    const double carried = std::max(delivered_, start_bytes_ / static_cast<double>(srtt_) * kSecond);
    rate_ = starting_ ? std::max(rate_, 2 * delivered_) : std::min(rate_, carried);
    start_bytes_ *= 2;
}

void RateControl::push_back(Time now) {
    starting_ = false;
    if (now - lowered_at_ < srtt_) return;
    lowered_at_ = now;
    rate_ = std::max(0.9 * rate_, packet_bytes_);
}

}  // namespace tailcut
