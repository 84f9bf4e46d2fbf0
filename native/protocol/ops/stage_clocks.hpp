// When a stage of an op ends by the clock (rule 1; docs/time.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "protocol/ops/terms.hpp"
#include "protocol/reports/report.hpp"
#include "protocol/roster.hpp"

namespace tailcut {

// When the clock ends a stage, and by which rule.
struct StageEnd {
    Time at = kNever;
    Ending by = Ending::kBound;
};

// The ranks whose last part has come. What is still missing of such a rank's values was lost or overtaken.
class LastParts {
public:
    explicit LastParts(Rank ranks) : at_(ranks, -1), missing_(ranks) {}

    void note(Rank rank, Time now);
    Time at(Rank rank) const { return at_[rank]; }
    // When the last parts of all ranks had come, except those of silent ranks; kNever: not yet.
    Time all_at(const Roster& roster) const;

private:
    std::vector<Time> at_;  // by rank; -1: its last part has not come
    std::size_t missing_;
};

// SCATTER of one shard. The majority starts the clock: if the fastest rank did, the others' contributions
// would be thrown away. The first entry only caps it.
class ScatterClock {
public:
    // `awaited`: how many of the ranks are.
    ScatterClock(Rank ranks, std::size_t awaited)
        : majority_((awaited + 1) / 2), entered_at_(ranks, -1), last_at_(ranks, -1), last_parts_(ranks) {}

    void note_entry(Rank rank, Time entered_at);
    void note_packet(Rank rank, Time now) { last_at_[rank] = now; }
    void note_last_part(Rank rank, Time now) { last_parts_.note(rank, now); }

    StageEnd end_at(const Bounds& bounds, const Roster& roster) const;
    // When reliable granules are given up. This leaves a quarter of the deadline for their mean to come.
    StageEnd reliable_end_at(const Bounds& bounds) const {
        return {entries_.front() + bounds.deadline / 4 * 3, Ending::kDeadline};
    }
    // Here and below, -1 means not known.
    Time majority_entered_at() const { return entries_.size() < majority_ ? -1 : entries_[majority_ - 1]; }
    Time entered_at(Rank rank) const { return entered_at_[rank]; }
    Time last_at(Rank rank) const { return last_at_[rank]; }  // when its latest packet came
    const LastParts& last_parts() const { return last_parts_; }

private:
    const std::size_t majority_;
    std::vector<Time> entered_at_;  // by rank
    std::vector<Time> entries_;     // the known ones, ascending
    std::vector<Time> last_at_;     // by rank
    LastParts last_parts_;
};

}  // namespace tailcut
