// Whom SCATTER of a bucket awaits: the ranks whose contribution to one of the last two ops of this bucket came
// within the bound t_B, also if it came after an early close, and that have not said that they are away. A rank that
// is not awaited costs its contribution and nothing else. Each owner judges for itself: to disagree changes only its own
// waits.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "protocol/ops/ownership.hpp"
#include "protocol/roster.hpp"

namespace tailcut {

class Attendance {
public:
    // If not `enabled`, everybody who is not silent is awaited in every op.
    Attendance(const Roster& roster, bool enabled, Seq window_ops)
        : roster_(roster), enabled_(enabled), window_ops_(window_ops) {}

    // By rank, for an op that opens now. If fewer than half of the others were on time, it is the network or the own
    // port that has changed, and those are awaited too that have entered the last op: what they sent is late, they are
    // not.
    std::vector<bool> awaited(Seq seq, std::uint32_t key) const;

    // SCATTER of an op has closed. `came`: by rank, whether its contribution was there. Until `due`, the rest is still
    // within the bound.
    void note_close(Seq seq, std::uint32_t key, std::vector<bool> came, Time due);
    // The end of a contribution has come after the close.
    void note_late(Time now, Seq seq, std::uint32_t key, Rank rank);

private:
    struct Roll {  // of one op
        Time due;
        std::vector<bool> came;
    };
    using Rolls = std::map<Seq, Roll>;

    const Roster& roster_;
    const bool enabled_;
    const Seq window_ops_;
    std::map<std::uint32_t, Rolls> buckets_;  // by key
};

}  // namespace tailcut
