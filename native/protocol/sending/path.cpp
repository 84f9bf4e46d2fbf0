#include "protocol/sending/path.hpp"

#include <utility>

namespace tailcut {
namespace {

// Checked again after this time while too much is in flight: the limit grows the longer nothing is heard.
constexpr Duration kRetry = kMillisecond;
// A datagram stays in the receiver's socket for no longer than this, unless its host does not get to run.
constexpr Duration kInSocket = 10 * kMillisecond;

}  // namespace

Path::Path(const PeerSettings& settings, Rank rivals)
    : paced_(settings.paced), flight_(settings), rate_(flight_.packet_bytes, rivals) {}

Time Path::clear_at(Time now, std::uint64_t shard_bytes, bool deaf) {
    if (deaf) flight_.land_before(now - rtt() - kInSocket);
    if (!flight_.has_credit(shard_bytes)) return kNever;
    if (!paced_) return now;
    most_in_flight_ = rate_.most_in_flight(now, deaf);
    if (!flight_.landed() && flight_.bytes() >= most_in_flight_) {
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
    if (flight_.landed()) {
        rate_.resume(now);
        busy_since_ = now;
    }
    const std::uint32_t window_bytes = flight_.window_bytes, packet_bytes = flight_.packet_bytes;
    const auto most = static_cast<std::uint32_t>(std::min<std::uint64_t>(window_bytes, most_in_flight_));
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
    const Duration busy = this->busy(now);
    departures_.refund(flight_.pop(), rate_.bytes_per_s());
    if (!in_flight()) busy_ = busy;
    --sent_packets_;
    if (paced_) rate_.push_back(now);
}

}  // namespace tailcut
