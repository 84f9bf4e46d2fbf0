#include "protocol/group_path.hpp"

#include <algorithm>
#include <tuple>

namespace tailcut {
namespace {

constexpr int kReordered = 3;  // as in path.cpp
constexpr Duration kLeastReordering = kMillisecond;
// A report reaches back so far: of what is in flight, nothing is forgotten.
constexpr std::uint32_t kMostInFlight = wire::kReportNumbers;
// Between replies, as in path.cpp, but as many packets as there are members that all reply at once.
constexpr std::uint32_t kLeastAskPackets = 6, kMostAskPackets = 128;

// Of an uplink, relative to a path: means are made as fast as one path brings contributions, and must not lag behind.
constexpr double kShares = 2;
constexpr double kNear = 1.25;       // a rate so many times the pace is held back by it
constexpr double kFall = 0.9;        // of the pace at once, in half a round trip, for one member alone
constexpr double kWorthTrial = 0.9;  // of the median: a slowest member above it is as good as the others
constexpr Duration kTrial = 20 * kMillisecond;  // long enough to double the rate several times
constexpr Duration kTrialRounds = 8;            // the same in round trips
// Between trials: as long as their queues may take to drain, and ever longer.
constexpr Duration kTrialPause = 50 * kMillisecond, kMostTrialPause = 5000 * kMillisecond;
// Of the median: half of it, less what a trial may be wrong by when others send to the same port.
constexpr double kSlow = 0.4;
constexpr int kSlowTrials = 3;
constexpr std::uint64_t kEnoughPackets = 32;  // for a trial to tell anything
constexpr Duration kPatience =
    25 * kMillisecond;  // with a member that does not answer; a busy host may take 10
constexpr Duration kPatienceRounds = 8;

}  // namespace

GroupPath::GroupPath(const PeerSettings& settings, std::size_t members, Rank rivals)
    : window_bytes_(settings.window_bytes),
      packet_bytes_(static_cast<std::uint32_t>(wire::kHeaderBytes) + settings.limits.payload_bytes),
      paced_(settings.paced),
      trial_pause_(kTrialPause) {
    for (std::size_t k = 0; k < members; ++k) {
        members_.emplace_back(RateControl(packet_bytes_, rivals));
        active_.set(k);
    }
    appraise(0);
}

bool GroupPath::has_credit(std::uint32_t cost) {
    if (used_ == 0) return true;
    if (used_ + cost > window_bytes_ || count_ >= kMostInFlight) return false;
    if (!paced_ || flying_bytes_ < most_bytes_) return true;
    ++limits_;
    return false;
}

Time GroupPath::paced_until(Time now) {
    if (!paced_) return now;
    const Duration quantum = pace_of(quantum_bytes_);
    due_ = std::max(due_, now - quantum);
    if (due_ <= now) return now;
    ++limits_;
    return due_ + quantum / 2;
}

void GroupPath::stamp(Time now, wire::Header& header) {
    header.stamp_us = std::max(1u, clock_us(now));
    header.number = number_;
    if (header.type != wire::Type::kData) return;
    header.number = static_cast<std::uint16_t>(number_ + 1);
    const auto most = static_cast<std::uint32_t>(paced_ ? std::min<std::uint64_t>(window_bytes_, most_bytes_)
                                                        : window_bytes_);
    const auto least =
        std::clamp(static_cast<std::uint32_t>(active_.count()), kLeastAskPackets, kMostAskPackets);
    const std::uint32_t ask =
        std::min(most / 2, std::clamp(most / 4, least * packet_bytes_, kMostAskPackets * packet_bytes_));
    if (unasked_ >= ask) header.flags |= wire::kReplyWanted;
}

void GroupPath::sent(const wire::Header& header, const Parcel& parcel, std::uint32_t bytes,
                     const Audience::Set& to) {
    if (count_ == ring_.size()) grow();
    busy_ += used_ == 0;
    number_ = header.number;
    ++count_;
    at(number_) = {header.stamp_us, bytes, false, to & active_, parcel};
    used_ += bytes + kDatagramOverheadBytes;
    flying_bytes_ += bytes;
    unasked_ = header.flags & wire::kReplyWanted ? 0 : unasked_ + bytes;
    due_ += pace_of(bytes);
    by_op_.add(parcel.seq);
}

void GroupPath::unsent(Time now) {
    InFlight& last = at(number_);
    due_ -= pace_of(last.bytes);
    land(last);
    forget(last);
    --count_;
    --number_;
    unasked_ = kMostAskPackets * packet_bytes_;  // it may have asked
    if (!paced_ || now == pushed_back_at_) return;
    pushed_back_at_ = now;
    for (Member& member : members_) member.rate.push_back(now);
    appraise(now);
}

void GroupPath::grow() {
    std::vector<InFlight> larger(std::max<std::size_t>(16, 2 * ring_.size()));
    for (std::uint32_t k = 0; k < count_; ++k) {
        const auto number = static_cast<std::uint16_t>(oldest() + k);
        larger[number % larger.size()] = at(number);
    }
    ring_ = std::move(larger);
}

void GroupPath::settle(InFlight& packet, std::size_t member) {
    packet.waiting.reset(member);
    if ((packet.waiting & ~excused_).none()) land(packet);
    if (packet.waiting.none()) forget(packet);
}

// It is no longer in flight,
void GroupPath::land(InFlight& packet) {
    if (std::exchange(packet.landed, true)) return;
    used_ -= packet.bytes + kDatagramOverheadBytes;
    flying_bytes_ -= packet.bytes;
}

// and nobody has to tell what became of it.
void GroupPath::forget(const InFlight& packet) { by_op_.remove(packet.parcel.seq); }

void GroupPath::pop_settled() {
    while (count_ > 0 && at(oldest()).waiting.none()) --count_;
}

bool GroupPath::awaits(Seq seq) const { return by_op_.any(seq); }

Audience::Set GroupPath::owing() const {
    Audience::Set owing;
    for (std::uint32_t k = 0; k < count_; ++k) owing |= at(static_cast<std::uint16_t>(oldest() + k)).waiting;
    return owing;
}

void GroupPath::settle(Time now, std::size_t index, const wire::Header& feedback,
                       std::span<const std::byte> missing, double mean_rate, std::vector<Parcel>& lost) {
    Member& member = members_[index];
    member.asked_at = -1;
    if (feedback.echo_us == 0) return;
    if (distance(feedback.latest, number_) < 0) return;  // a number that we never sent
    const auto us = [](std::uint32_t difference) {
        return Duration{static_cast<std::int32_t>(difference)} * kMicrosecond;
    };
    const Duration held = us(feedback.stamp_us - feedback.arrival_us);
    const Duration rtt = us(clock_us(now) - feedback.echo_us) - held;
    if (rtt >= 0 && held >= 0) {
        member.rtt = member.rtt == 0 ? rtt : member.rtt + (rtt - member.rtt) / 8;
        rtt_ = rtt_ == 0 ? rtt : rtt_ + (rtt - rtt_) / 8;
    }
    const auto patience_us =
        static_cast<std::uint32_t>(std::max(kLeastReordering, member.rtt / 4) / kMicrosecond);

    RateControl::Sample sample;
    sample.rtt = std::max<Duration>(rtt, 1);
    sample.delay = us(feedback.delay_us);
    if (feedback.share > 0) sample.receiver_share = feedback.share / 256.0;
    if (mean_rate > 0) sample.sender_share = pace_ / (kShares * mean_rate);
    int later = 0;  // numbers that came, counted from the latest
    for (int k = 0; k <= distance(oldest(), feedback.latest); ++k) {
        InFlight& packet = at(static_cast<std::uint16_t>(feedback.latest - k));
        const bool came = Arrivals::reported(missing, k);
        later += came;
        if (!packet.waiting[index]) continue;
        if (came) {
            sample.delivered_bytes += packet.bytes;
        } else if (later >= kReordered || after(feedback.echo_us, packet.stamp_us + patience_us)) {
            sample.lost_bytes += packet.bytes;
            lost.push_back(packet.parcel);
            ++member.lost_packets;
        } else {
            continue;
        }
        ++member.settled_packets;
        settle(packet, index);
    }
    pop_settled();
    probe_at = kNever;
    probe_after_ = 0;

    const std::uint32_t before_us = std::exchange(member.arrival_us, feedback.arrival_us);
    if (std::exchange(member.busy, busy_) == busy_)
        sample.span = std::max<Duration>(0, us(member.arrival_us - before_us));
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

void GroupPath::give_up(Time now, std::size_t index, std::vector<Parcel>& lost) {
    active_.reset(index);
    for (std::uint32_t k = 0; k < count_; ++k) {
        InFlight& packet = at(static_cast<std::uint16_t>(oldest() + k));
        if (!packet.waiting[index]) continue;
        lost.push_back(packet.parcel);
        settle(packet, index);
    }
    pop_settled();
    appraise(now);
}

void GroupPath::admit(Time now, std::size_t index) {
    Member& member = members_[index];
    active_.set(index);
    member.asked_at = -1;
    member.slow = 0;
    member.busy = 0;
    trial_until_ = kNever;  // it was not there when it began
    excused_.reset();
    appraise(now);
}

// The pace, from the rates of all. Called when the slowest has reported, or another has become slower.
void GroupPath::appraise(Time now) {
    const bool tried = trial_until_ <= now;
    if (tried) end_trial(now);
    rates_.clear();
    most_bytes_ = 0;
    for (std::size_t k = 0; k < members_.size(); ++k)
        if (active_[k]) {
            rates_.emplace_back(members_[k].rate.bytes_per_s(), k);
            most_bytes_ = std::max(most_bytes_, members_[k].rate.most_in_flight(now));
        }
    if (rates_.empty()) return;
    const auto median = middle_rate(), least = *std::min_element(rates_.begin(), rates_.end());
    const bool held_back = std::exchange(appraised_limits_, limits_) != limits_;
    if (trial_until_ == kNever && held_back && now >= next_trial_ && least.first < kWorthTrial * median.first)
        begin_trial(now, median.first, members_[median.second].rate.srtt());
    const auto [rate, setter] = trial_until_ != kNever ? median : least;
    setter_ = setter;
    // What many see is on the way of all, what one alone sees may be its busy host: that is followed slowly.
    const double slowly = now - lowered_at_ >= rtt_ / 2 ? kFall * pace_ : pace_;
    if (rate < pace_ && slowly < pace_) lowered_at_ = now;
    pace_ = tried || pace_ == 0 ? rate : std::max(rate, std::min(median.first, slowly));
    quantum_bytes_ = members_[setter_].rate.quantum_bytes();
}

std::pair<double, std::size_t> GroupPath::middle_rate() {
    const auto middle = rates_.begin() + static_cast<std::ptrdiff_t>(rates_.size() / 2);
    std::nth_element(rates_.begin(), middle, rates_.end());
    return *middle;
}

// The slower ones do not hold back the others.
void GroupPath::begin_trial(Time now, double median, Duration rtt) {
    trial_until_ = now + std::max(kTrial, kTrialRounds * rtt);
    for (Member& member : members_) {
        member.tried_bytes = member.tried_for = 0;
        member.before_trial = member.rate.bytes_per_s();
    }
    for (const auto& [rate, index] : rates_) excused_[index] = rate < kWorthTrial * median;
    for (std::uint32_t k = 0; k < count_; ++k) {
        InFlight& packet = at(static_cast<std::uint16_t>(oldest() + k));
        if ((packet.waiting & ~excused_).none()) land(packet);
    }
}

void GroupPath::end_trial(Time now) {
    const bool late = now - std::exchange(trial_until_, kNever) > kTrial;  // it ran out of data
    excused_.reset();
    rates_.clear();
    for (std::size_t k = 0; k < members_.size(); ++k)
        if (active_[k])
            rates_.emplace_back(1e9 * static_cast<double>(members_[k].tried_bytes) /
                                    static_cast<double>(members_[k].tried_for + 1),
                                k);
    if (rates_.empty()) return;
    const auto [median, middle] = middle_rate();
    if (late || members_[middle].tried_bytes < kEnoughPackets * packet_bytes_)
        return;  // tells nothing: try again
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

void GroupPath::arm_probe(Time now) {
    if (probe_at != kNever) return;
    const Duration first = std::clamp(4 * rtt_, Path::kProbeFloor, Path::kProbeCeiling);
    probe_after_ = probe_after_ == 0 ? first : std::min(2 * probe_after_, Path::kProbeCeiling);
    probe_at = now + probe_after_;
}

bool GroupPath::unresponsive(Time now, std::size_t index) const {
    const Member& member = members_[index];
    return member.asked_at >= 0 && now - member.asked_at >= std::max(kPatience, kPatienceRounds * member.rtt);
}

void GroupPath::asked(Time now, std::size_t index) {
    Time& at = members_[index].asked_at;
    if (at < 0) at = now;
}

}  // namespace tailcut
