// The way from this rank to all members of its multicast at once, as Path is the way to one rank.
//
// A packet is in flight until every member it was meant for has settled it, delivered or lost. What a member
// has lost is sent again on the member's own path. Each member's FEEDBACK feeds a RateControl of its own, and
// the pace is that of the slowest member. While the slowest holds the others back, it is not known what they
// could take. So from time to time there is a trial: for a moment the pace is the median's. A member is too
// slow if it gets far less than half of what the median gets, in the trial or by its own rate before, three
// times in a row.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "protocol/multicast/audience.hpp"
#include "protocol/sending/flight.hpp"
#include "protocol/sending/parcel.hpp"

namespace tailcut {

class GroupPath {
public:
    // `rivals`: senders to the same receivers.
    GroupPath(const PeerSettings& settings, std::size_t members, Rank rivals);

    // ---- sending: see Path
    Time clear_at(Time now, std::uint64_t shard_bytes);
    void stamp(Time now, wire::Header& header);
    void sent(const wire::Header& header, const Parcel& parcel, std::uint32_t bytes, const Audience::Set& to);
    void unsent(Time now);

    // ---- what became of it
    // Appends to `lost` what the member has lost. `mean_rate`: over this sender's paths, bytes/s.
    void settle(Time now, std::size_t member, const wire::Header& feedback, std::span<const std::byte> report,
                double mean_rate, LostParcels& lost);
    // The member is no longer waited for: what it has not settled is lost to it.
    void dismiss(Time now, std::size_t member, LostParcels& lost);
    void admit(Time now, std::size_t member);
    const Audience::Set& active() const { return active_; }
    bool in_flight() const { return !flight_.empty(); }
    bool awaits(Seq seq) const { return flight_.awaits(seq); }
    Audience::Set owing();  // members that have not settled all packets
    // Members found to be too slow; the caller dismisses them.
    std::vector<std::size_t>& slow() { return slow_; }

    ProbeTimer probe;
    void arm_probe(Time now) { probe.arm(now, 4 * round_trip_.smooth()); }
    // Whether the member has been asked for long enough without an answer.
    bool unresponsive(Time now, std::size_t member) const;
    void asked(Time now, std::size_t member);

    double bytes_per_s() const { return pace_; }
    // Packets that the member has settled, and how many of these it lost.
    std::uint64_t settled_packets(std::size_t member) const { return members_[member].settled_packets; }
    std::uint64_t lost_packets(std::size_t member) const { return members_[member].lost_packets; }

    // Used by Broadcast, as in a Link.
    Seq served_below = 0;
    Seq room_below = 0;        // ops for which most members are known to have room
    bool room_wanted = false;  // blocked because members lack room

private:
    struct Member {
        explicit Member(RateControl rate) : rate(rate) {}
        RateControl rate;
        RoundTrip round_trip;
        std::uint32_t arrival_us = 0;  // of its last FEEDBACK used
        std::uint64_t busy = 0;        // the busy period of that FEEDBACK; 0: none
        std::uint64_t limits = 0;      // limits_ at that FEEDBACK
        // What came to the member in a trial, and how long that took by its own clock: waiting in queues does
        // not count.
        std::uint64_t tried_bytes = 0;
        Duration tried_for = 0;
        double before_trial = 0;  // its rate, bytes/s
        int slow = 0;             // in how many trials in a row
        Time asked_at = -1;       // when it was first asked since its last answer
        std::uint64_t settled_packets = 0, lost_packets = 0;
    };
    using Packet = Flight<Audience::Set>::Packet;
    void settle(Packet& packet, std::size_t member);
    void appraise(Time now);
    std::pair<double, std::size_t> middle_rate();
    void begin_trial(Time now, double median, Duration rtt);
    void end_trial(Time now);

    const bool paced_;
    Flight<Audience::Set> flight_;
    Departures departures_;
    RoundTrip round_trip_;  // over all members
    std::vector<Member> members_;
    Audience::Set active_, excused_;  // excused: what they have not settled takes no credit during a trial
    std::uint64_t busy_ = 1;          // number of periods with something in flight
    Time pushed_back_at_ = 0;

    // the pace
    std::size_t setter_ = 0;        // the member whose rate it is
    double pace_ = 0;               // bytes/s
    std::uint64_t most_bytes_ = 0;  // allowed in flight
    std::uint32_t quantum_bytes_ = 0;
    std::uint64_t limits_ = 1, appraised_limits_ = 1;  // how often the pace held back
    Time trial_until_ = kNever, next_trial_ = 0;       // kNever: no trial
    Duration trial_pause_;
    Time lowered_at_ = 0;
    std::vector<std::pair<double, std::size_t>> rates_;  // scratch of appraise()
    std::vector<std::size_t> slow_;
};

}  // namespace tailcut
