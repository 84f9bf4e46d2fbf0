// The rate at which a rank sends to one other rank. It is derived from how long datagrams take and how fast
// they arrive.
//
// Every FEEDBACK says when datagrams came and the least one-way delay among them. Its excess over the least
// delay ever seen is the queue on the way, whatever the clocks say and however long the way back is. The rate
// is the delivered rate, plus a part while the queue is shorter than its target or minus a part while it is
// longer, plus one packet per round trip in any case. The target is a number of bytes of this sender's own: a
// slower sender accepts a longer queue, so it keeps its share beside others. Receivers tell each sender how
// its share compares with the others', and a sender knows how its own paths compare: those with more yield
// some to those with less. A little loss says nothing on a lossy link. Much loss says that the queue has less
// room than the target, which is then lowered. docs/pacing.md has the measurements.
#pragma once

#include <cstdint>

#include "base/types.hpp"

namespace tailcut {

class RateControl {
public:
    // What a FEEDBACK says about the datagrams since the last one.
    struct Sample {
        Duration rtt = 0;
        Duration delay = 0;  // least one-way delay between two clocks: only differences are meaningful
        // From the last FEEDBACK's latest arrival to this one's; 0: the path was idle before.
        Duration span = 0;
        std::uint64_t delivered_bytes = 0, lost_bytes = 0;
        double receiver_share = 1;  // what came from us, relative to the mean over the receiver's sources
        double sender_share = 1;    // our rate to it, relative to the mean over this sender's destinations
    };

    RateControl(std::uint32_t packet_bytes, Rank rivals);

    void learn(Time now, const Sample& sample);
    void resume(Time now) { heard_at_ = now, ++resumed_; }  // after an idle time
    void push_back(Time now);                               // our own host's queue is full
    void limited() { limited_ = true; }                     // the rate limits sending, not a lack of packets
    void starved() { starved_ = 2; }  // there was nothing to send: holds for this decision and the next

    double bytes_per_s() const { return rate_; }
    bool known() const { return !starting_; }  // the rate is more than a guess
    Duration srtt() const { return srtt_; }
    // According to the last FEEDBACK, there is no queue.
    bool idle() const { return delay_ - base_ < target() / 4; }
    // `deaf`: nobody at all is heard.
    std::uint64_t most_in_flight(Time now, bool deaf) const;
    std::uint32_t quantum_bytes() const;  // sent at once: a few packets, or what half a millisecond takes

private:
    void decide(Time now);
    void start_up(bool congested);
    bool enough(std::uint64_t bytes) const;  // whether these suffice for a decision
    bool timed() const { return sum_.span > 0 && enough(timed_bytes_ + sum_.lost_bytes); }
    Duration target() const;
    void keep_base(Time now, Duration delay);

    const double packet_bytes_, target_bytes_;
    double start_bytes_;           // allowed in flight while starting; doubles every round trip
    double rate_, delivered_ = 0;  // bytes/s
    bool starting_ = true, limited_ = false;
    Duration srtt_ = 0, base_rtt_ = 0, queue_ = 0;
    // The last one-way delay, and its mean change from one FEEDBACK to the next.
    Duration delay_ = 0, jumps_ = 0;
    Duration target_cap_ = kNever;       // a longer queue has turned out to lose packets
    Duration base_ = 0, next_base_ = 0;  // least one-way delay in the last period, and in the current one
    Time base_since_ = -1, decided_at_ = 0, lowered_at_ = 0, heard_at_ = 0;
    int starved_ = 0, stalled_ = 0;              // counted in decisions
    int resumed_ = 0;                            // how often the path resumed since the last decision
    double best_ = 0;                            // the highest delivered_ while starting
    double recent_lost_ = 0, recent_bytes_ = 0;  // weighted less with age
    Sample sum_;                                 // over the samples since the last decision
    std::uint64_t timed_bytes_ = 0;              // delivered within sum_'s span
};

}  // namespace tailcut
