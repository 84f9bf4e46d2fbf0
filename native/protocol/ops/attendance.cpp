#include "protocol/ops/attendance.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

namespace tailcut {
namespace {

constexpr std::size_t kRolls = 2;              // ops of a bucket that decide
constexpr std::size_t kKeptRolls = 4;          // an owner closes ops out of order
constexpr std::size_t kMostBuckets = 1 << 12;  // keys come from the network too

}  // namespace

std::vector<bool> Attendance::awaited(Seq seq, std::uint32_t key) const {
    std::vector<bool> present(roster_.ranks()), here(roster_.ranks());
    for (Rank rank = 0; rank < roster_.ranks(); ++rank) {
        present[rank] = rank == roster_.self() || !roster_.silent(rank);
        here[rank] = present[rank] && !roster_[rank].away;
    }
    if (!enabled_) return present;
    // While most are away, those who come back first do not go on alone.
    if (2 * std::ranges::count(here, true) > std::ranges::count(present, true)) present = here;
    const auto bucket = buckets_.find(key);
    if (bucket == buckets_.end()) return present;
    const Rolls& rolls = bucket->second;
    auto roll = rolls.lower_bound(seq);
    if (std::distance(rolls.begin(), roll) < static_cast<std::ptrdiff_t>(kRolls)) return present;
    const Seq latest = std::prev(roll)->first;
    std::vector<bool> awaited(roster_.ranks());
    int others = 0, on_time = 0;
    for (std::size_t k = 0; k < kRolls; ++k) {
        const std::vector<bool>& came = (--roll)->second.came;
        for (Rank rank = 0; rank < roster_.ranks(); ++rank)
            awaited[rank] = awaited[rank] || (present[rank] && came[rank]);
    }
    for (Rank rank = 0; rank < roster_.ranks(); ++rank) {
        if (rank == roster_.self()) continue;
        others += present[rank];
        on_time += awaited[rank];
    }
    for (Rank rank = 0; 2 * on_time < others && rank < roster_.ranks(); ++rank)
        awaited[rank] = awaited[rank] || (present[rank] && roster_[rank].entered > latest);
    return std::ranges::count(awaited, true) > 0 ? awaited : present;
}

void Attendance::note_close(Seq seq, std::uint32_t key, std::vector<bool> came, Time due) {
    if (!enabled_) return;
    if (buckets_.size() >= kMostBuckets && !buckets_.contains(key))
        std::erase_if(buckets_,
                      [&](const auto& bucket) { return bucket.second.rbegin()->first + window_ops_ < seq; });
    Rolls& rolls = buckets_[key];
    rolls.insert_or_assign(seq, Roll{due, std::move(came)});
    if (rolls.size() > kKeptRolls) rolls.erase(rolls.begin());
}

void Attendance::note_late(Time now, Seq seq, std::uint32_t key, Rank rank) {
    const auto bucket = buckets_.find(key);
    if (bucket == buckets_.end()) return;
    const auto roll = bucket->second.find(seq);
    if (roll != bucket->second.end() && now <= roll->second.due) roll->second.came[rank] = true;
}

}  // namespace tailcut
