#include "protocol/multicast/group_path.hpp"

#include <algorithm>
#include <tuple>

namespace tailcut {
namespace {

// How much of the uplink multicast may take, relative to one path: means become final as fast as one path
// brings contributions, and must not lag behind.
constexpr double kShares = 2;
constexpr double kNear = 1.25;  // a rate of up to this many times the pace is held back by it
// One member alone lowers the pace at most to this share of it per half a round trip.
constexpr double kFall = 0.9;
constexpr double kWorthTrial = 0.9;  // of the median: a slowest member above this is as good as the others
constexpr Duration kTrial = 20 * kMillisecond;  // long enough to double the rate several times
constexpr Duration kTrialRounds = 8;            // the same in round trips
// Pause between trials: as long as their queues may take to drain, and ever longer.
constexpr Duration kTrialPause = 50 * kMillisecond, kMostTrialPause = 5000 * kMillisecond;
// A member below this share of the median is slow: a half, less the possible error of a trial when others
// send to the same port.
constexpr double kSlow = 0.4;
constexpr int kSlowTrials = 3;
constexpr std::uint64_t kEnoughPackets = 32;  // a trial with fewer says nothing
// How long a member that does not answer is waited for; a busy host may take 10 ms.
constexpr Duration kPatience = 25 * kMillisecond;
constexpr Duration kPatienceRounds = 8;

}  // namespace

GroupPath::GroupPath(const PeerSettings& settings, std::size_t members, Rank rivals)
    : paced_(settings.paced), flight_(settings), trial_pause_(kTrialPause) {
    for (std::size_t k = 0; k < members; ++k) {
        members_.emplace_back(RateControl(flight_.packet_bytes, rivals));
        active_.set(k);
    }
    appraise(0);
}

Time GroupPath::clear_at(Time now, std::uint64_t shard_bytes) {
    if (!flight_.has_credit(shard_bytes)) return kNever;
    if (!paced_) return now;
    if (!flight_.landed() && flight_.bytes() >= most_bytes_) {
        ++limits_;
        return kNever;
    }
    const Time at = departures_.next(now, pace_, quantum_bytes_);
    limits_ += at > now;
    return at;
}

void GroupPath::stamp(Time now, wire::Header& header) {
    flight_.stamp(now, header);
    if (header.type != wire::Type::kData) return;
    const std::uint32_t window_bytes = flight_.window_bytes, packet_bytes = flight_.packet_bytes;
    const auto most = static_cast<std::uint32_t>(paced_ ? std::min<std::uint64_t>(window_bytes, most_bytes_)
                                                        : window_bytes);
    // At least as many packets as there are members, because all members reply at once.
    const auto least =
        std::clamp(static_cast<std::uint32_t>(active_.count()), kLeastAskPackets, kMostAskPackets);
    const std::uint32_t ask =
        std::min(most / 2, std::clamp(most / 4, least * packet_bytes, kMostAskPackets * packet_bytes));
    if (flight_.unasked_bytes() >= ask) header.flags |= wire::kReplyWanted;
}

void GroupPath::sent(const wire::Header& header, const Parcel& parcel, std::uint32_t bytes,
                     const Audience::Set& to) {
    busy_ += flight_.landed();
    flight_.push(header, parcel, bytes, to & active_);
    departures_.charge(bytes, pace_);
}

void GroupPath::unsent(Time now) {
    departures_.refund(flight_.pop(), pace_);
    if (!paced_ || now == pushed_back_at_) return;
    pushed_back_at_ = now;
    for (Member& member : members_) member.rate.push_back(now);
    appraise(now);
}

void GroupPath::settle(Packet& packet, std::size_t member) {
    packet.waiting.reset(member);
    if ((packet.waiting & ~excused_).none()) flight_.land(packet);
    if (packet.waiting.none()) flight_.done(packet);
}

Audience::Set GroupPath::owing() {
    Audience::Set owing;
    flight_.for_each([&](const Packet& packet) { owing |= packet.waiting; });
    return owing;
}

void GroupPath::settle(Time now, std::size_t index, const wire::Header& feedback,
                       std::span<const std::byte> report, double mean_rate, LostParcels& lost) {
    Member& member = members_[index];
    member.asked_at = -1;
    if (!flight_.knows(feedback)) return;
    round_trip_.learn(now, feedback);
    RateControl::Sample sample = sample_of(feedback, member.round_trip.learn(now, feedback));
    if (mean_rate > 0) sample.sender_share = pace_ / (kShares * mean_rate);
    flight_.settle(
        feedback, report, member.round_trip.patience_us(),
        [&](const Packet& packet) { return packet.waiting[index]; },
        [&](Packet& packet, bool came) {
            (came ? sample.delivered_bytes : sample.lost_bytes) += packet.bytes;
            if (!came || packet.parcel.cut) lost.add(packet.parcel);
            member.lost_packets += !came;
            ++member.settled_packets;
            settle(packet, index);
        });
    flight_.shrink();
    probe.answered();

    const std::uint32_t before_us = std::exchange(member.arrival_us, feedback.arrival_us);
    if (std::exchange(member.busy, busy_) == busy_)
        sample.span = std::max<Duration>(0, from_us(member.arrival_us - before_us));
    if (!paced_ || !active_[index]) return;
    if (trial_until_ != kNever && sample.span > 0) {
        member.tried_bytes += sample.delivered_bytes;
        member.tried_for += sample.span;
    }
    const bool limited = std::exchange(member.limits, limits_) != limits_;
    if (limited && member.rate.bytes_per_s() <= kNear * pace_) member.rate.limited();
    member.rate.learn(now, sample);
    if (index == setter_ || member.rate.bytes_per_s() < pace_) appraise(now);
}

void GroupPath::dismiss(Time now, std::size_t index, LostParcels& lost) {
    active_.reset(index);
    flight_.for_each([&](Packet& packet) {
        if (!packet.waiting[index]) return;
        lost.add(packet.parcel);
        settle(packet, index);
    });
    flight_.shrink();
    appraise(now);
}

void GroupPath::admit(Time now, std::size_t index) {
    Member& member = members_[index];
    active_.set(index);
    member.asked_at = -1;
    member.slow = 0;
    member.busy = 0;
    trial_until_ = kNever;  // the member was not there when the trial began
    excused_.reset();
    appraise(now);
}

// Sets the pace from the rates of all members. Called when the slowest has reported, or another has become
// slower.
void GroupPath::appraise(Time now) {
    const bool tried = trial_until_ <= now;
    if (tried) end_trial(now);
    rates_.clear();
    most_bytes_ = 0;
    for (std::size_t k = 0; k < members_.size(); ++k)
        if (active_[k]) {
            rates_.emplace_back(members_[k].rate.bytes_per_s(), k);
            most_bytes_ = std::max(most_bytes_, members_[k].rate.most_in_flight(now, true));
        }
    if (rates_.empty()) return;
    const auto median = middle_rate(), least = *std::min_element(rates_.begin(), rates_.end());
    const bool held_back = std::exchange(appraised_limits_, limits_) != limits_;
    if (trial_until_ == kNever && held_back && now >= next_trial_ && least.first < kWorthTrial * median.first)
        begin_trial(now, median.first, members_[median.second].rate.srtt());
    const auto [rate, setter] = trial_until_ != kNever ? median : least;
    setter_ = setter;
    // What many members see is on the way to all of them. What one alone sees may be its busy host, so the
    // pace follows it slowly.
    const double slowly = now - lowered_at_ >= round_trip_.smooth() / 2 ? kFall * pace_ : pace_;
    if (rate < pace_ && slowly < pace_) lowered_at_ = now;
    pace_ = tried || pace_ == 0 ? rate : std::max(rate, std::min(median.first, slowly));
    quantum_bytes_ = members_[setter_].rate.quantum_bytes();
}

std::pair<double, std::size_t> GroupPath::middle_rate() {
    const auto middle = rates_.begin() + static_cast<std::ptrdiff_t>(rates_.size() / 2);
    std::nth_element(rates_.begin(), middle, rates_.end());
    return *middle;
}

// During a trial, the slower members do not hold back the others.
void GroupPath::begin_trial(Time now, double median, Duration rtt) {
    trial_until_ = now + std::max(kTrial, kTrialRounds * rtt);
    for (Member& member : members_) {
        member.tried_bytes = member.tried_for = 0;
        member.before_trial = member.rate.bytes_per_s();
    }
    for (const auto& [rate, index] : rates_) excused_[index] = rate < kWorthTrial * median;
    flight_.for_each([&](Packet& packet) {
        if ((packet.waiting & ~excused_).none()) flight_.land(packet);
    });
}

void GroupPath::end_trial(Time now) {
    const bool late = now - std::exchange(trial_until_, kNever) > kTrial;  // there was too little to send
    excused_.reset();
    rates_.clear();
    for (std::size_t k = 0; k < members_.size(); ++k)
        if (active_[k])
            rates_.emplace_back(1e9 * static_cast<double>(members_[k].tried_bytes) /
                                    static_cast<double>(members_[k].tried_for + 1),
                                k);
    if (rates_.empty()) return;
    const auto [median, middle] = middle_rate();
    if (late || members_[middle].tried_bytes < kEnoughPackets * flight_.packet_bytes)
        return;  // says nothing: try again
    bool doubtful = false;
    for (const auto& [rate, index] : rates_) {
        int& slow = members_[index].slow;
        slow = std::min(rate, members_[index].before_trial) < kSlow * median ? slow + 1 : 0;
        doubtful |= slow > 0;
        if (slow >= kSlowTrials) slow_.push_back(index);
    }
    if (!doubtful) trial_pause_ = std::min(2 * trial_pause_, kMostTrialPause);
    next_trial_ = now + (doubtful ? kTrialPause : trial_pause_);
}

bool GroupPath::unresponsive(Time now, std::size_t index) const {
    const Member& member = members_[index];
    return member.asked_at >= 0 &&
           now - member.asked_at >= std::max(kPatience, kPatienceRounds * member.round_trip.smooth());
}

void GroupPath::asked(Time now, std::size_t index) {
    Time& at = members_[index].asked_at;
    if (at < 0) at = now;
}

}  // namespace tailcut
