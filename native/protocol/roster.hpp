// What is known of the other ranks: how far they are, which are silent and which have left. An Op only reads
// it; the endpoint changes it.
#pragma once

#include <algorithm>
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
        bool quiet = false;    // several ops have ended without a word from it
        bool lost = false;     // it is too far behind to serve its shard
        bool away = false;     // it has said that it will enter no op for a while
        int quiet_ops = 0;     // ops in a row that ended without a word from it
        Time heard_at = -1;
        std::uint8_t incast = 0;  // senders it accepts at once; 0: any number
        Seq served_from = 0;      // means of earlier ops are gone, as far as it has said
        Seq wanted_from = 0;      // it takes no means of earlier ops any more, as far as it has said

        bool wants(Seq seq) const { return seq >= wanted_from; }  // the mean of this op
        bool left(Seq seq) const { return leaving && seq >= leaves_at; }
        bool silent() const { return quiet || lost; }  // it is not waited for
    };

    Roster(const Shape& shape, Seq first_seq);

    Rank self() const { return self_; }
    Rank ranks() const { return static_cast<Rank>(members_.size()); }
    const Member& operator[](Rank rank) const { return members_[rank]; }
    bool silent(Rank rank) const { return members_[rank].silent(); }
    std::size_t silent_count() const { return silent_count_; }
    bool present(Rank rank) const { return !silent(rank) && !members_[rank].leaving; }
    bool hears_nobody() const;  // everybody else is silent, or has left while somebody is silent
    // Whether its mean of an op that is over may still come.
    bool serves(Rank rank, Seq seq) const {
        const Member& member = members_[rank];
        return !member.silent() && !member.left(seq) && seq >= member.served_from;
    }
    // When the latest datagram that has come from anybody was sent.
    Time heard_at() const { return heard_at_; }
    // When DATA was first sent after anybody was last heard; kNever: somebody was heard since.
    Time unanswered_since() const { return spoke_at_ > heard_at_ ? spoke_at_ : kNever; }
    // How long it takes to find a packet lost and send it again, twice; 0: nothing is sent again.
    Duration repeat_time() const { return repeat_time_; }
    // The least number that anybody asks for; 0: nobody asks.
    std::uint8_t least_incast() const;
    const LrScale& lr_scale() const { return lr_scale_; }  // the latest that anybody has announced

    // Rule 3: the op that at least half of the others have reached, without silent ones. When four or more are
    // there, one rank alone cannot drag us along. Who has said goodbye still serves what it has entered.
    Seq group_seq(Seq own) const;
    Seq behind_ops(Seq own) const;

    // A datagram of the rank has come, which it had sent at this time by our clock.
    void hear(Time now, Time sent, Rank rank, std::uint8_t incast);
    void hear(const LrScale& told, Seq by);
    void note_spoke(Time now) {
        if (spoke_at_ <= heard_at_) spoke_at_ = now;
    }
    bool note_entered(Rank rank, Seq entered);  // returns whether that is news
    bool note_away(Rank rank, bool away);       // returns whether that is news
    void note_served_from(Rank rank, Seq from) { members_[rank].served_from = from; }
    void note_wanted_from(Rank rank, Seq from) {
        members_[rank].wanted_from = std::max(members_[rank].wanted_from, from);
    }
    void note_leaving(Rank rank, Seq from);
    // An op that we entered at this time has ended without all: ranks that were not heard since then may be
    // silent.
    void note_partial(Time entered_at);
    void note_lost(Rank rank, bool lost) { set(rank, &Member::lost, lost); }
    void set_repeat_time(Duration time) { repeat_time_ = time; }

private:
    void set(Rank rank, bool Member::* why, bool is);

    const Rank self_;
    std::vector<Member> members_;
    std::size_t silent_count_ = 0, limiting_count_ = 0;
    Time heard_at_ = -1, spoke_at_ = -1;
    Duration repeat_time_ = 0;
    LrScale lr_scale_;
};

}  // namespace tailcut
