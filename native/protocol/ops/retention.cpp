#include "protocol/ops/retention.hpp"

#include <algorithm>
#include <iterator>

#include "protocol/carry/carry.hpp"

namespace tailcut {
namespace {

constexpr int kSweptOps = 4;  // retire() looks at this many of the older ops each time

}  // namespace

// ---- memory -----------------------------------------------------------------------------------------------

Block Retention::room(std::size_t floats) {
    for (;;) {
        if (Block block = context_.memory.take_pool(floats)) return block;
        if (!evict_mean(table_.next_seq) && !context_.carry.evict()) return {};
    }
}

// The oldest goes first, so that what is left is all that is later than some op.
bool Retention::evict_mean(Seq below) {
    const auto history = [](const auto& op) { return op->is_history(); };
    const auto slot = std::find_if(table_.slots.begin(), table_.slots.end(), [&](const auto& entry) {
        return std::any_of(entry.second.variants.begin(), entry.second.variants.end(), history);
    });
    if (slot == table_.slots.end() || slot->first >= below) return false;
    retire_if(slot->second, [](const Op& op) { return op.is_history(); });
    note_eviction(slot->first);
    return true;
}

void Retention::note_eviction(Seq seq) {
    ++accounts_.counters.evicted_means;
    served_from_ = std::max(served_from_, seq + 1);
    forgot_ = true;
}

// Takes pool memory for the mean of an op that is over.
Block Retention::history_room(const Op& op) {
    const std::size_t floats = op.compact_floats();
    while (context_.memory.pool_used_bytes() + floats * sizeof(float) > settings_.pool_bytes / 4 * 3 &&
           evict_mean(op.seq())) {
    }
    return context_.memory.take_pool(floats);
}

// ---- who needs what ------------------------------------------------------------------------------------------

// Whether nobody needs anything of the op any more.
bool Retention::retired(Seq seq, const Op& op) const {
    if (seq >= table_.next_seq)
        return table_.stopped;  // peers that have heard our goodbye expect nothing of ours from here on
    if (!op.ended() && op.entered()) return false;
    if (!op.reduced()) return false;
    if (settings_.resend && links_.everybody.awaits(seq)) return false;
    for (Rank rank = 0; rank < roster_.ranks(); ++rank) {
        if (rank == roster_.self() || roster_[rank].left(seq)) continue;
        if (!op.served(rank) || owes_late(rank, op)) return false;
        if (settings_.resend && !roster_[rank].leaving && links_[rank].path.awaits(seq))
            return false;  // it may have to be sent again
    }
    return true;
}

// Whether a peer is in the op and has not been sent all of its mean. Then the op is not history yet: it only
// waits for credit.
bool Retention::awaited(Seq seq, const Op& op) const {
    for (Rank rank = 0; rank < roster_.ranks(); ++rank)
        if (rank != roster_.self() && roster_[rank].entered > seq && !op.served(rank)) return true;
    return false;
}

// Rule 9: whether something is owed to a peer that comes too late for the op. History may take three quarters of
// the pool, and an eighth is reserved for ops that this rank has not reached.
bool Retention::owes_late(Rank rank, const Op& op) const {
    return op.owes_late(rank) && context_.memory.pool_used_bytes() <= settings_.pool_bytes / 8 * 7;
}

template <typename Predicate>
void Retention::retire_if(OpSlot& slot, Predicate over) {
    std::erase_if(slot.variants, [&](const auto& op) {
        if (!over(*op)) return false;
        if (op->owns()) slot.retired.push_back(op->bucket());
        if (settings_.record_fates) table_.note_served(*op);
        return true;
    });
}

void Retention::retire(Seq fresh) {
    auto at = table_.slots.begin();
    while (at != table_.slots.end() && at->first < table_.next_seq &&
           table_.next_seq - at->first > settings_.window_ops)
        at = retire_some(at);
    at = table_.slots.lower_bound(swept_);
    for (int k = 0; k < kSweptOps && at != table_.slots.end() && at->first < fresh; ++k) at = retire_some(at);
    swept_ = at != table_.slots.end() && at->first < fresh ? at->first : 0;
    for (at = table_.slots.lower_bound(fresh); at != table_.slots.end() && at->first < table_.next_seq;)
        at = retire_some(at);
}

Retention::Slots::iterator Retention::retire_some(Slots::iterator at) {
    const Seq seq = at->first;
    retire_if(at->second, [&](const Op& op) { return retired(seq, op); });
    retire_if(at->second, [&](Op& op) {
        if (op.entered() && !op.ended()) return false;
        if (table_.next_seq - seq > settings_.late_ops()) op.drop_late_contributions();
        bool drop = table_.next_seq - seq > settings_.window_ops;
        if (!drop && op.ended() && table_.next_seq - seq > 2 && !op.compacted()) {
            Block smaller = history_room(op);
            drop = !smaller && !awaited(seq, op);
            if (smaller) op.compact(std::move(smaller));
        }
        if (drop && !retired(seq, op)) note_eviction(seq);
        return drop;
    });
    if (!at->second.variants.empty()) return std::next(at);
    for (auto& late : table_.late) late.erase(seq);
    return table_.slots.erase(at);
}

void Retention::skip(Seq from) {
    for (auto at = table_.slots.lower_bound(from); at != table_.slots.end() && at->first < table_.next_seq;) {
        for (auto& op : at->second.variants) op->drop_means();
        at = retire_some(at);
    }
}

bool Retention::all_retired() const {
    for (const auto& [seq, slot] : table_.slots)
        for (const auto& op : slot.variants)
            if (!retired(seq, *op)) return false;
    return true;
}

Seq Retention::oldest_needed() const {
    for (const auto& [seq, slot] : table_.slots)
        for (const auto& op : slot.variants)
            if (!retired(seq, *op)) return std::min(seq, table_.next_seq);
    return table_.next_seq;
}

}  // namespace tailcut
