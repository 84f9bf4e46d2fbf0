// Whom a stage of a bucket awaits: the ranks whose contribution, or whose mean, in one of the last two ops of this bucket came
// within the bound t_B, also if it came after an early close. A rank that is not awaited costs what it would have
// brought, and that is carried. Each rank judges for itself: to disagree changes only its own waits.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "protocol/ops/ownership.hpp"
#include "protocol/roster.hpp"
#include "wire/header.hpp"

namespace tailcut {

class Attendance {
public:
    // If not `enabled`, everybody who is not silent is awaited in every op.
    Attendance(wire::Stage stage, const Roster& roster, bool enabled, Seq window_ops)
        : stage_(stage), roster_(roster), enabled_(enabled), window_ops_(window_ops) {}

    // By rank, for an op that opens now, or that the local rank enters now. SCATTER does not await who is away; its engine
    // serves its shard. If fewer than half of the others were on time, it is the network or the own port that has
    // changed. Then GATHER awaits everybody, or this rank would run ahead, and SCATTER those too that have entered the
    // last op: what they sent is late, they are not.
    std::vector<bool> awaited(Seq seq, std::uint32_t key) const;

    // The stage of an op has ended. `came`: by rank, whether all was there. Until `due`, the rest is still within the
    // bound.
    void note_close(Seq seq, std::uint32_t key, std::vector<bool> came, Time due);
    // The end of what a rank had to bring has come afterwards.
    void note_late(Time now, Seq seq, std::uint32_t key, Rank rank);

private:
    struct Roll {  // of one op
        Time due;
        std::vector<bool> came;
    };
    using Rolls = std::map<Seq, Roll>;

    const wire::Stage stage_;
    const Roster& roster_;
    const bool enabled_;
    const Seq window_ops_;
    std::map<std::uint32_t, Rolls> buckets_;  // by key
};

}  // namespace tailcut
