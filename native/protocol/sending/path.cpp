#include "protocol/sending/path.hpp"

#include <utility>

namespace tailcut {
namespace {

// Checked again after this time while too much is in flight: the limit grows the longer nothing is heard.
constexpr Duration kRetry = kMillisecond;

}  // namespace

Path::Path(const PeerSettings& settings, Rank rivals)
    : paced_(settings.paced), flight_(settings), rate_(flight_.packet_bytes, rivals) {}

Time Path::clear_at(Time now, std::uint64_t shard_bytes) {
    if (!flight_.has_credit(shard_bytes)) return kNever;
    if (!paced_) return now;
    if (!flight_.landed() && flight_.bytes() >= rate_.most_in_flight(now)) {
        rate_.limited();
        return now + kRetry;
    }
    const Time at = departures_.next(now, rate_.bytes_per_s(), rate_.quantum_bytes());
    if (at > now) rate_.limited();
    return at;
}

void Path::stamp(Time now, wire::Header& header) {
    flight_.stamp(now, header);
    if (header.type != wire::Type::kData) return;
    if (flight_.landed()) rate_.resume(now);
    const std::uint32_t window_bytes = flight_.window_bytes, packet_bytes = flight_.packet_bytes;
    const auto most =
        static_cast<std::uint32_t>(std::min<std::uint64_t>(window_bytes, rate_.most_in_flight(now)));
    const std::uint32_t ask = std::clamp((paced_ ? most : window_bytes) / 4, kLeastAskPackets * packet_bytes,
                                         kMostAskPackets * packet_bytes);
    // The last packet that may be in flight asks if no other has: otherwise nothing would come back before a
    // probe.
    const bool last = paced_ && flight_.unasked_bytes() + 2 * packet_bytes > most;
    if (flight_.unasked_bytes() >= ask || last) header.flags |= wire::kReplyWanted;
}

void Path::sent(const wire::Header& header, const Parcel& parcel, std::uint32_t bytes) {
    // The path was idle, so no rate follows from the next arrival.
    if (flight_.landed()) arrival_known_ = false;
    flight_.push(header, parcel, bytes, {});
    departures_.charge(bytes, rate_.bytes_per_s());
    ++sent_packets_;
}

void Path::unsent(Time now) {
    departures_.refund(flight_.pop(), rate_.bytes_per_s());
    --sent_packets_;
    if (paced_) rate_.push_back(now);
}

void Path::settle(Time now, const wire::Header& feedback, std::span<const std::byte> report,
                  double mean_rate) {
    if (!flight_.knows(feedback)) return;
    RateControl::Sample sample = sample_of(feedback, round_trip_.learn(now, feedback));
    if (mean_rate > 0) sample.sender_share = rate_.bytes_per_s() / mean_rate;
    flight_.settle(
        feedback, report, round_trip_.patience_us(), [](const auto& packet) { return packet.waiting.open; },
        [&](auto& packet, bool came) {
            (came ? sample.delivered_bytes : sample.lost_bytes) += packet.bytes;
            if (!came) {
                lost_.add(packet.parcel);
                ++lost_packets_;
            }
            packet.waiting.open = false;
            flight_.done(packet);
        });
    flight_.shrink();
    probe.answered();

    const std::uint32_t before_us = std::exchange(arrival_us_, feedback.arrival_us);
    if (std::exchange(arrival_known_, true))
        sample.span = std::max<Duration>(0, from_us(arrival_us_ - before_us));
    if (paced_) rate_.learn(now, sample);
}

}  // namespace tailcut
