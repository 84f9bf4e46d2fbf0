// How long ops are kept, and which go first when memory is short. An op that is over is kept while somebody may still
// need something of it: its mean becomes history in the pool, for at most W ops. Invariant: of the means that somebody
// may need, all from served_from() on are here. So the oldest always goes first.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "protocol/ops/bucket_ballot.hpp"
#include "protocol/ops/memory.hpp"
#include "protocol/ops/op.hpp"
#include "protocol/reports/accounts.hpp"
#include "protocol/roster.hpp"
#include "protocol/settings.hpp"

namespace tailcut {

// All that is there of one op.
struct OpSlot {
    BucketBallot ballot;
    std::vector<std::unique_ptr<Op>> variants;  // one for each bucket stated
    // Buckets whose mean was served and dropped: packets for them are late.
    std::vector<BucketId> retired;
};

// The ops of one rank. Ops writes it.
struct OpTable {
    std::map<Seq, OpSlot> slots;
    std::vector<std::set<Seq>> late;  // by rank: rule 9, see Ops::late()
    Seq next_seq;                     // of the local rank
    bool stopped = false;             // no more ops are entered
    // With a ledger: what this rank has done as an owner in ops that it will not enter.
    std::vector<OpReport> served{};

    // The op is about to be dropped.
    void note_served(const Op& op) {
        if (!op.entered() && op.own_final() > 0) served.push_back(op.so_far());
    }
};

class Retention {
public:
    Retention(const Settings& settings, const OpContext& context, const Roster& roster, const Links& links,
              Accounts& accounts, OpTable& table)
        : settings_(settings),
          context_(context),
          roster_(roster),
          links_(links),
          accounts_(accounts),
          table_(table) {}

    // Pool memory, for which history and then what is late is given up; empty if that is not enough.
    Block room(std::size_t floats);
    // Drops what nobody needs, and moves what a late peer needs to the pool. Ops from `fresh` on are all looked at.
    // If a peer is dead there are many others, so only a few of them are looked at each time.
    void retire(Seq fresh);
    // The local rank enters none of the ops from this one on that are before its next one: what was kept for it goes.
    void skip(Seq from);
    bool all_retired() const;
    // The oldest op that somebody may still need something of; next_seq if there is none.
    Seq oldest_needed() const;
    Seq served_from() const { return served_from_; }  // means of earlier ops may be gone
    void forget_before(Seq seq) { served_from_ = std::max(served_from_, seq); }
    bool take_forgot() { return std::exchange(forgot_, false); }  // a mean is gone that somebody may need

private:
    using Slots = std::map<Seq, OpSlot>;
    template <typename Predicate>
    void retire_if(OpSlot& slot, Predicate over);
    Slots::iterator retire_some(Slots::iterator at);
    bool retired(Seq seq, const Op& op) const;
    bool awaited(Seq seq, const Op& op) const;
    bool owes_late(Rank rank, const Op& op) const;
    Block history_room(const Op& op);
    bool evict_mean(Seq below);
    void note_eviction(Seq seq);

    const Settings& settings_;
    const OpContext& context_;
    const Roster& roster_;
    const Links& links_;
    Accounts& accounts_;
    OpTable& table_;
    Seq served_from_ = 0;
    Seq swept_ = 0;  // where retire() continues among the ops that only late peers need
    bool forgot_ = false;
};

}  // namespace tailcut
