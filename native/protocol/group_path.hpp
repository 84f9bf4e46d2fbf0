// The way from this rank to all members of its multicast at once, as Path is the way to one of them.
//
// A packet flies until every member it was meant for has settled it, delivered or lost; what a member has lost is its own
// path's to send again. Each member's FEEDBACK feeds a RateControl of its own, and the pace is that of the slowest. What the
// others could take is not known while it holds them back. So from time to time there is a trial: for a moment the pace is
// the median's. Who gets far less than half of what the median then gets, in the trial or by its own rate before, and that
// three times in a row, is not worth waiting for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "protocol/audience.hpp"
#include "protocol/op_counts.hpp"
#include "protocol/path.hpp"

namespace tailcut {

class GroupPath {
public:
    // `rivals`: senders to the same receivers.
    GroupPath(const PeerSettings& settings, std::size_t members, Rank rivals);

    // ---- sending: see Path
    bool has_credit(std::uint32_t cost);
    Time paced_until(Time now);
    void stamp(Time now, wire::Header& header);
    void sent(const wire::Header& header, const Parcel& parcel, std::uint32_t bytes, const Audience::Set& to);
    void unsent(Time now);

    // ---- what became of it
    // Appends what the member has lost. `mean_rate`: of this sender's paths, bytes/s.
    void settle(Time now, std::size_t member, const wire::Header& feedback,
                std::span<const std::byte> missing, double mean_rate, std::vector<Parcel>& lost);
    // It is waited for no longer: what it has not settled is lost to it.
    void give_up(Time now, std::size_t member, std::vector<Parcel>& lost);
    void admit(Time now, std::size_t member);
    const Audience::Set& active() const { return active_; }
    bool in_flight() const { return count_ > 0; }
    bool awaits(Seq seq) const;   // something of this op is in flight
    Audience::Set owing() const;  // members that have not settled all
    // Found to be too slow; the caller gives them up.
    std::vector<std::size_t>& slow() { return slow_; }

    Time probe_at = kNever;
    void arm_probe(Time now);
    // Whether it has been asked, time and again, and has said nothing.
    bool unresponsive(Time now, std::size_t member) const;
    void asked(Time now, std::size_t member);

    double bytes_per_s() const { return pace_; }
    // Packets that it settled, and those of them that it lost.
    std::uint64_t settled_packets(std::size_t member) const { return members_[member].settled_packets; }
    std::uint64_t lost_packets(std::size_t member) const { return members_[member].lost_packets; }

    // the endpoint's: as of a Peer
    bool ready = false;
    Time wake_at = kNever;
    Seq served_below = 0;
    Seq room_below = 0;        // ops for which most members are known to have room
    bool room_wanted = false;  // blocked by the lack of it

private:
    struct InFlight {
        std::uint32_t stamp_us = 0, bytes = 0;
        bool landed = false;    // takes no credit any more
        Audience::Set waiting;  // members that have not settled it
        Parcel parcel;
    };
    struct Member {
        explicit Member(RateControl rate) : rate(rate) {}
        RateControl rate;
        Duration rtt = 0;
        std::uint32_t arrival_us = 0;  // of its last FEEDBACK used,
        std::uint64_t busy = 0;        // in this busy period; 0: in none
        std::uint64_t limits = 0;      // limits_ at that time
        // What came to it in a trial, and in which time by its own clock: how long it waited in queues does not matter.
        std::uint64_t tried_bytes = 0;
        Duration tried_for = 0;
        double before_trial = 0;  // its rate, bytes/s
        int slow = 0;             // trials in a row
        Time asked_at = -1;       // first, since its last answer
        std::uint64_t settled_packets = 0, lost_packets = 0;
    };
    InFlight& at(std::uint16_t number) { return ring_[number % ring_.size()]; }
    const InFlight& at(std::uint16_t number) const { return ring_[number % ring_.size()]; }
    std::uint16_t oldest() const { return static_cast<std::uint16_t>(number_ - count_ + 1); }
    void grow();
    void settle(InFlight& packet, std::size_t member);
    void land(InFlight& packet);
    void forget(const InFlight& packet);
    void pop_settled();
    void appraise(Time now);
    std::pair<double, std::size_t> middle_rate();
    void begin_trial(Time now, double median, Duration rtt);
    void end_trial(Time now);
    Duration pace_of(std::uint64_t bytes) const {
        return static_cast<Duration>(static_cast<double>(bytes) / pace_ * 1e9);
    }

    const std::uint32_t window_bytes_, packet_bytes_;
    const bool paced_;
    std::vector<Member> members_;
    Audience::Set active_, excused_;  // excused: in a trial, what they have not settled takes no credit
    std::vector<InFlight> ring_;  // by number modulo its size, a power of two: those from oldest() to number_
    std::uint16_t number_ = 0;    // of the last one sent
    std::uint32_t count_ = 0;
    OpCounts by_op_;          // packets of each op that somebody has not settled
    std::uint32_t used_ = 0;  // of the window, by what is in flight
    std::uint64_t flying_bytes_ = 0;
    std::uint32_t unasked_ = 0;  // bytes sent since a reply was last wanted
    Time due_ = 0;               // when all that was sent so far would have left at the pace
    std::uint64_t busy_ = 1;     // periods with something in flight
    Duration rtt_ = 0, probe_after_ = 0;
    Time pushed_back_at_ = 0;

    // the pace
    std::size_t setter_ = 0;        // the member whose rate it is
    double pace_ = 0;               // bytes/s
    std::uint64_t most_bytes_ = 0;  // in flight
    std::uint32_t quantum_bytes_ = 0;
    std::uint64_t limits_ = 1, appraised_limits_ = 1;  // how often the pace held back
    Time trial_until_ = kNever, next_trial_ = 0;       // kNever: there is none
    Duration trial_pause_;
    Time lowered_at_ = 0;
    std::vector<std::pair<double, std::size_t>> rates_;  // scratch of appraise()
    std::vector<std::size_t> slow_;
};

}  // namespace tailcut
