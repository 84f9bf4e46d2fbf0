// Rule 12: a rank that leaves says GOODBYE to every other, again and again until it has been heard, and
// serves what others still need meanwhile.
#pragma once

#include <vector>

#include "protocol/roster.hpp"

namespace tailcut {

class Goodbye {
public:
    explicit Goodbye(const Roster& roster) : roster_(roster), peers_(roster.ranks()) {}

    // No op from this one on is entered or served.
    void begin(Seq unserved_from) {
        leaving_ = true;
        unserved_from_ = unserved_from;
        for (Peer& peer : peers_) peer.due = true;
    }
    Seq unserved_from() const { return unserved_from_; }
    bool due(Rank rank) const { return peers_[rank].due; }
    void said(Rank rank) { peers_[rank].due = false; }
    void note_heard(Rank rank) { peers_[rank].heard = true; }
    // Whether the peer may not have heard it. A peer that leaves itself need not hear it.
    bool unheard(Rank rank) const { return leaving_ && !roster_[rank].leaving && !peers_[rank].heard; }
    void repeat(Rank rank) { peers_[rank].due = true; }

private:
    struct Peer {
        bool due = false, heard = false;
    };
    const Roster& roster_;
    std::vector<Peer> peers_;  // by rank
    Seq unserved_from_ = 0;
    bool leaving_ = false;
};

}  // namespace tailcut
