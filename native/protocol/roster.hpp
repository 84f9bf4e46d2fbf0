// What is known of the other ranks: how far they are, which are silent and which have left. An Op only reads
// it; the endpoint changes it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "protocol/ops/ownership.hpp"
#include "protocol/ops/terms.hpp"

namespace tailcut {

class Roster {
public:
    struct Member {
        Seq entered = 0;       // ops it is known to have entered
        Seq leaves_at = 0;     // if it has said goodbye: the first op that it does not enter
        bool leaving = false;  // it has said goodbye
        bool silent = false;   // several ops have ended without a word from it: it is not waited for
        int quiet_ops = 0;     // ops in a row that ended without a word from it
        Time heard_at = -1;
        std::uint8_t incast = 0;  // senders it accepts at once; 0: any number

        bool left(Seq seq) const { return leaving && seq >= leaves_at; }
    };

    Roster(const Shape& shape, Seq first_seq);

    Rank self() const { return self_; }
    Rank ranks() const { return static_cast<Rank>(members_.size()); }
    const Member& operator[](Rank rank) const { return members_[rank]; }
    bool silent(Rank rank) const { return members_[rank].silent; }
    std::size_t silent_count() const { return silent_count_; }
    bool present(Rank rank) const { return !members_[rank].silent && !members_[rank].leaving; }
    Time heard_at() const { return heard_at_; }  // when anybody was last heard
    // How long it takes to find a packet lost and send it again, twice; 0: nothing is sent again.
    Duration repeat_time() const { return repeat_time_; }
    // The least number that anybody asks for; 0: nobody asks.
    std::uint8_t least_incast() const;
    const LrScale& lr_scale() const { return lr_scale_; }  // the latest that anybody has announced

    // Rule 3: the op that at least half of those present have reached, this rank included. When four or more
    // are present, one rank alone cannot drag us along.
    Seq group_seq(Seq own) const;
    Seq behind_ops(Seq own) const;

    void hear(Time now, Rank rank, std::uint8_t incast);
    void hear(const LrScale& told, Seq by);
    bool note_entered(Rank rank, Seq entered);  // returns whether that is news
    void note_leaving(Rank rank, Seq from);
    // An op that we entered at this time has ended without all: ranks that were not heard since then may be
    // silent.
    void note_partial(Time entered_at);
    void set_repeat_time(Duration time) { repeat_time_ = time; }

private:
    const Rank self_;
    std::vector<Member> members_;
    std::size_t silent_count_ = 0, limiting_count_ = 0;
    Time heard_at_ = -1;
    Duration repeat_time_ = 0;
    LrScale lr_scale_;
};

}  // namespace tailcut
