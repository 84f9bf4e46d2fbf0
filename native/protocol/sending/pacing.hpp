// The rate at which a rank sends to one other: found from how long datagrams take and how fast they arrive.
//
// Every FEEDBACK says when datagrams came and the least one-way delay among them; above the least ever seen, that is
// the queue on the way, whatever the clocks say and however long the way back is. The rate is what was delivered, and
// a part more while the queue is shorter than its target, a part less while it is longer, and a packet a round trip
// more in any case. The target is a number of bytes of this sender's own: the slower it is, the longer a queue it
// accepts, so it keeps a share beside others. Receivers tell each sender how its share compares with the others', and a
// sender knows that of each of its own paths: who has more yields some to who has less. Loss alone says little on a
// lossy link; much of it says that the queue's room is shorter than the target, which is lowered.
// docs/pacing.md has what was measured.
#pragma once

#include <cstdint>

#include "base/types.hpp"

namespace tailcut {

class RateControl {
public:
    // What a FEEDBACK tells of the datagrams since the last one.
    struct Sample {
        Duration rtt = 0;
        Duration delay = 0;  // least one-way delay, by two clocks: only differences mean anything
        Duration span = 0;  // between the latest arrival of this FEEDBACK and of the last one; 0: idle before
        std::uint64_t delivered_bytes = 0, lost_bytes = 0;
        double receiver_share = 1;  // what came of it, relative to the mean over the receiver's sources
        double sender_share = 1;    // its rate, relative to the mean over this sender's destinations
    };

    RateControl(std::uint32_t packet_bytes, Rank rivals);

    void learn(Time now, const Sample& sample);
    void resume(Time now) { heard_at_ = now, ++resumed_; }  // after an idle time
    void push_back(Time now);                               // the own host's queue is full
    void limited() { limited_ = true; }                     // the rate, not the data, is what holds back
    void starved() { starved_ = 2; }  // there was nothing to send: for this decision and the next

    double bytes_per_s() const { return rate_; }
    bool known() const { return !starting_; }  // the rate is more than a guess
    Duration srtt() const { return srtt_; }
    bool idle() const { return delay_ - base_ < target() / 4; }  // by the last FEEDBACK, nobody queues
    std::uint64_t most_in_flight(Time now) const;
    std::uint32_t quantum_bytes() const;  // sent at once: a few packets, or half a millisecond

private:
    void decide(Time now);
    void start_up(bool congested);
    bool enough(std::uint64_t bytes) const;  // for a decision
    bool timed() const { return sum_.span > 0 && enough(timed_bytes_ + sum_.lost_bytes); }
    Duration target() const;
    void keep_base(Time now, Duration delay);

    const double packet_bytes_, target_bytes_;
    double start_bytes_;           // in flight while starting; doubles every round trip
    double rate_, delivered_ = 0;  // bytes/s
    bool starting_ = true, limited_ = false;
    Duration srtt_ = 0, base_rtt_ = 0, queue_ = 0;
    Duration delay_ = 0,
             jumps_ = 0;  // the last one-way delay, and its mean change from one FEEDBACK to the next
    Duration target_cap_ = kNever;       // what loss has shown to be too long a queue
    Duration base_ = 0, next_base_ = 0;  // least one-way delay in the last period and in the one begun
    Time base_since_ = -1, decided_at_ = 0, lowered_at_ = 0, heard_at_ = 0;
    int starved_ = 0, stalled_ = 0;              // decisions
    int resumed_ = 0;                            // how often since the last decision
    double best_ = 0;                            // the most delivered while starting
    double recent_lost_ = 0, recent_bytes_ = 0;  // with weights that fall with age
    Sample sum_;                                 // since the last decision
    std::uint64_t timed_bytes_ = 0;              // of those delivered, in its span
};

}  // namespace tailcut
