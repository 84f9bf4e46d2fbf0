#include "protocol/ops/stage_clocks.hpp"

#include <algorithm>

namespace tailcut {

void LastParts::note(Rank rank, Time now) {
    if (at_[rank] >= 0) return;
    at_[rank] = now;
    --missing_;
}

Time LastParts::all_at(const Roster& roster) const {
    if (missing_ > roster.silent_count() || missing_ == at_.size()) return kNever;
    Time last = 0;
    for (Rank rank = 0; rank < at_.size(); ++rank) {
        if (at_[rank] < 0 && !roster.silent(rank)) return kNever;
        last = std::max(last, at_[rank]);
    }
    return last;
}

void ScatterClock::note_entry(Rank rank, Time entered_at) {
    if (entered_at_[rank] >= 0) return;
    entered_at_[rank] = entered_at;
    entries_.insert(std::upper_bound(entries_.begin(), entries_.end(), entered_at), entered_at);
}

StageEnd ScatterClock::end_at(const Bounds& bounds, const Roster& roster) const {
    if (entries_.empty()) return {};
    StageEnd end{entries_.front() + bounds.scatter_cap, Ending::kBound};
    if (const Time majority = majority_entered_at(); majority >= 0)
        end.at = std::min(end.at, majority + bounds.scatter);
    const Time last_parts = last_parts_.all_at(roster);
    const Duration grace = std::max(bounds.scatter_grace, roster.repeat_time());
    if (last_parts != kNever && last_parts + grace < end.at) end = {last_parts + grace, Ending::kGrace};
    return end;
}

}  // namespace tailcut
