#include "protocol/path.hpp"

#include <utility>

namespace tailcut {
namespace {

constexpr int kReordered = 3;  // later numbers that came before one that did not is given up (RFC 9002)
constexpr std::uint32_t kMostInFlight = 1 << 14;  // numbers are told apart up to twice as many
constexpr Duration kRetry =
    kMillisecond;  // too much is in flight: the longer nothing is heard, the more may be
constexpr Duration kLeastReordering = kMillisecond;
// A reply is wanted four times in what may be in flight, but for at most 128 packets and not for fewer than 6, which
// keeps FEEDBACK below 2 % of the bytes.
constexpr std::uint32_t kLeastAskPackets = 6, kMostAskPackets = 128;

}  // namespace

Path::Path(const PeerSettings& settings, Rank rivals)
    : window_bytes_(settings.window_bytes),
      packet_bytes_(static_cast<std::uint32_t>(wire::kHeaderBytes) + settings.limits.payload_bytes),
      paced_(settings.paced),
      rate_(packet_bytes_, rivals) {}

Time Path::clear_at(Time now, std::uint32_t cost) {
    if (used_ > 0 && (used_ + cost > window_bytes_ || count_ >= kMostInFlight)) return kNever;
    if (!paced_) return now;
    if (used_ > 0 && flying_bytes_ >= rate_.most_in_flight(now)) {
        rate_.limited();
        return now + kRetry;
    }
    const Duration quantum = pace_of(rate_.quantum_bytes());
    due_ = std::max(due_, now - quantum);  // what was not used is lost, but for a quantum
    if (due_ <= now) return now;
    rate_.limited();
    return due_ + quantum / 2;  // then several at once
}

void Path::stamp(Time now, wire::Header& header) {
    header.stamp_us = std::max(1u, clock_us(now));  // 0: in an echo, nothing received yet
    header.number = number_;
    if (header.type != wire::Type::kData) return;
    header.number = static_cast<std::uint16_t>(number_ + 1);
    if (used_ == 0) rate_.resume(now);
    const auto most =
        static_cast<std::uint32_t>(std::min<std::uint64_t>(window_bytes_, rate_.most_in_flight(now)));
    const std::uint32_t ask = std::clamp((paced_ ? most : window_bytes_) / 4,
                                         kLeastAskPackets * packet_bytes_, kMostAskPackets * packet_bytes_);
    // The last that may be in flight asks if none of the others has: nothing would come back before a probe.
    const bool last = paced_ && unasked_ + 2 * packet_bytes_ > most;
    if (unasked_ >= ask || last) header.flags |= wire::kReplyWanted;
}

void Path::sent(const wire::Header& header, const Parcel& parcel, std::uint32_t bytes) {
    if (count_ == ring_.size()) grow();
    if (used_ == 0) arrival_known_ = false;  // the path was idle: no rate follows from the next arrival
    number_ = header.number;
    ++count_;
    at(number_) = {header.stamp_us, bytes, false, parcel};
    used_ += cost_of(bytes);
    flying_bytes_ += bytes;
    unasked_ = header.flags & wire::kReplyWanted ? 0 : unasked_ + bytes;
    due_ += pace_of(bytes);
    ++sent_packets_;
    by_op_.add(parcel.seq);
}

void Path::unsent(Time now) {
    InFlight& last = at(number_);
    settle(last);
    due_ -= pace_of(last.bytes);
    --count_;
    --number_;
    --sent_packets_;
    unasked_ = kMostAskPackets * packet_bytes_;  // it may have asked
    if (paced_) rate_.push_back(now);
}

void Path::grow() {
    std::vector<InFlight> larger(std::max<std::size_t>(16, 2 * ring_.size()));
    for (std::uint32_t k = 0; k < count_; ++k) {
        const auto number = static_cast<std::uint16_t>(oldest() + k);
        larger[number % larger.size()] = at(number);
    }
    ring_ = std::move(larger);
}

void Path::settle(InFlight& packet) {
    packet.settled = true;
    used_ -= cost_of(packet.bytes);
    flying_bytes_ -= packet.bytes;
    by_op_.remove(packet.parcel.seq);
}

bool Path::awaits(Seq seq) const {
    return by_op_.any(seq) ||
           std::any_of(lost_.begin(), lost_.end(), [&](const Parcel& parcel) { return parcel.seq == seq; });
}

void Path::settle(Time now, const wire::Header& feedback, std::span<const std::byte> missing,
                  double mean_rate) {
    if (feedback.echo_us == 0) return;
    if (distance(feedback.latest, number_) < 0) return;  // a number that we never sent
    const auto us = [](std::uint32_t difference) {
        return Duration{static_cast<std::int32_t>(difference)} * kMicrosecond;
    };
    const Duration held = us(feedback.stamp_us - feedback.arrival_us);
    const Duration rtt = us(clock_us(now) - feedback.echo_us) - held;
    if (rtt >= 0 && held >= 0) rtt_ = rtt_ == 0 ? rtt : rtt_ + (rtt - rtt_) / 8;
    const auto patience_us = static_cast<std::uint32_t>(std::max(kLeastReordering, rtt_ / 4) / kMicrosecond);

    RateControl::Sample sample;
    sample.rtt = std::max<Duration>(rtt, 1);
    sample.delay = us(feedback.delay_us);
    if (feedback.share > 0) sample.receiver_share = feedback.share / 256.0;
    if (mean_rate > 0) sample.sender_share = rate_.bytes_per_s() / mean_rate;
    int later = 0;  // numbers that came, counted from the latest
    for (int k = 0; k <= distance(oldest(), feedback.latest); ++k) {
        InFlight& packet = at(static_cast<std::uint16_t>(feedback.latest - k));
        const bool came = Arrivals::reported(missing, k);
        later += came;
        if (packet.settled) continue;
        if (came) {
            sample.delivered_bytes += packet.bytes;
        } else if (later >= kReordered || after(feedback.echo_us, packet.stamp_us + patience_us)) {
            sample.lost_bytes += packet.bytes;
            lost_.push_back(packet.parcel);
            ++lost_packets_;
        } else {
            continue;
        }
        settle(packet);
    }
    while (count_ > 0 && at(oldest()).settled) --count_;
    probe_at = kNever;
    probe_after_ = 0;

    const std::uint32_t before_us = std::exchange(arrival_us_, feedback.arrival_us);
    if (std::exchange(arrival_known_, true)) sample.span = std::max<Duration>(0, us(arrival_us_ - before_us));
    if (paced_) rate_.learn(now, sample);
}

void Path::arm_probe(Time now) {
    if (probe_at != kNever) return;
    const Duration first =
        std::clamp(2 * rtt_, kProbeFloor, kProbeCeiling);  // as a tail loss probe (RFC 8985)
    probe_after_ = probe_after_ == 0 ? first : std::min(2 * probe_after_, kProbeCeiling);
    probe_at = now + probe_after_;
}

}  // namespace tailcut
