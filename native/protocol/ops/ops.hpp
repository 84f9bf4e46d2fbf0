// The ops of one rank: which exist, the buckets that ranks state for them, and when they end. It keeps the reports of
// those that have ended.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "protocol/ops/attendance.hpp"
#include "protocol/ops/bucket_ballot.hpp"
#include "protocol/ops/memory.hpp"
#include "protocol/ops/op.hpp"
#include "protocol/ops/retention.hpp"
#include "protocol/reports/accounts.hpp"
#include "protocol/roster.hpp"
#include "protocol/sending/peer_pools.hpp"
#include "protocol/settings.hpp"

namespace tailcut {

// Is told when SCATTER of an op's own shard has closed, and when it would have closed without all
// contributions.
class CloseListener {
public:
    virtual ~CloseListener() = default;
    virtual void on_close(Op& op, Time due) = 0;
};

class Ops {
public:
    using Slot = OpSlot;
    using Slots = std::map<Seq, OpSlot>;

    Ops(const Settings& settings, const OpContext& context, Roster& roster, Attendance& attendance,
        const Links& links, PeerPools& pools, Accounts& accounts, CloseListener* listener);

    // ---- the local rank
    Seq next_seq() const { return table_.next_seq; }
    // Whether this rank has entered no op since it skipped some: means of ops before next_seq() are of no use to it.
    bool has_skipped() const { return skipped_to_ == table_.next_seq; }
    std::uint16_t latest_epoch() const { return context_.epochs.latest().number; }
    std::size_t in_flight() const { return in_flight_; }  // ops entered and not ended
    bool contributing() const { return contributing_; }
    bool stopped() const { return table_.stopped; }
    const Terms& terms() const { return terms_; }        // of the latest op
    void expect(const Terms& terms) { terms_ = terms; }  // of ops that this rank has not entered
    void enter(Time now, Ticket ticket, std::span<float> bucket, const Terms& terms);
    void resynced();
    void rejoined() { contributing_ = true; }  // what this rank holds as an owner stays
    void stop() { table_.stopped = true; }     // no more ops are entered
    // Rule 3: this rank is too far behind. What was in flight ends, next_seq() becomes the group's, and this
    // rank contributes nothing until its state has been copied from a peer, because its gradients come from
    // old parameters.
    void jump(Time now);
    // An epoch has begun with this op: what was done in it and in later ones in an earlier epoch is void.
    void cut_anew(Time now, Seq from);
    void skip_to(Seq seq);  // ops before this one will not be entered
    void abort(Time now);   // ends what is in flight

    // ---- from the network
    bool over(const wire::Header& header) const;  // the op has ended here and was retired
    // DATA of an op that is not over and within the window.
    std::optional<wire::Reject> deliver(Time now, const wire::Header& header,
                                        std::span<const std::byte> payload);
    // DATA of a stage that is over: the next op of the bucket may take it in (rule 9).
    std::optional<wire::Reject> note_late(Time now, const wire::Header& header,
                                          std::span<const std::byte> payload);
    void peer_left(Time now, Rank rank, Seq from);

    // ---- a mean that is shared beyond the group
    bool will_close(Seq seq) const;  // the own shard of this op has still to close
    void close(Time now, Seq seq);
    bool overtaken(Seq seq) const;  // its mean was reduced before this rank has entered
    // `put` gives the reduction what it waits for. It is not called if the reduction waits for nothing.
    void reduce(Time now, Seq seq, std::uint32_t bucket_len, bool non_finite,
                const std::function<void(Reduction&)>& put);

    // ---- time
    Time next_timer() const;
    void advance(Time now);

    // ---- for those who send
    Slots& slots() { return table_.slots; }
    Op* find(Seq seq, BucketId bucket);
    // Rule 9: ops of which something may be owed to a rank that comes too late for them.
    std::set<Seq>& late(Rank rank) { return table_.late[rank]; }
    // Whether a rank is so far behind that the means of ops that are over here are history to it.
    bool lags(Rank rank) const;
    Seq first_timed() const { return first_timed_; }  // ops before this one are over here
    Seq served_from() const { return retention_.served_from(); }
    bool takes_late(Rank rank) const { return roster_.present(rank); }
    bool take_forgot() { return retention_.take_forgot(); }
    bool take_news() { return std::exchange(news_, false); }  // there may be something to send to anybody

    // ---- the end of ops
    void retire();
    bool all_retired() const { return retention_.all_retired(); }
    Seq oldest_needed() const { return retention_.oldest_needed(); }
    std::vector<OpReport>& reports() { return reports_; }

    // ---- for the ledger
    // What this rank has done in ops that have not ended here, as far as it has changed since the last call.
    std::vector<OpReport> take_open();
    std::vector<OpReport> take_served() { return std::exchange(table_.served, {}); }

private:
    Slot& slot_of(Seq seq);
    Op* variant(Seq seq, Slot& slot, BucketId bucket, bool own);
    void own(Time now, Slot& slot, Op& op, Block memory);
    Block room(std::size_t floats, wire::Stage stage, const Op& wanting, Time now);
    void note_skip();
    bool evict_shard(const Op& wanting, Time now);
    std::optional<wire::Reject> scatter(Time now, Slot& slot, Op& op, const wire::Header& header,
                                        std::span<const std::byte> payload);
    std::optional<wire::Reject> gather(Time now, Op& op, const wire::Header& header,
                                       std::span<const std::byte> payload);
    void vote(Time now, Slot& slot, Rank rank, BucketId bucket);
    void note_closed(Op& op);
    void end_if_complete(Time now, Slot& slot, Op& op);
    void end(Time now, Slot& slot, Op& op, Status status, Ending ending);
    Bounds bounds_of(const Op& op) const;
    void skip_untimed();

    const Settings& settings_;
    const OpContext& context_;
    Roster& roster_;
    Attendance& attendance_;
    const Links& links_;
    PeerPools& pools_;
    Accounts& accounts_;
    CloseListener* const listener_;  // or null
    OpTable table_;
    Retention retention_;
    Terms terms_;                           // of the latest op
    std::uint32_t terms_len_ = 0xFFFFFFFF;  // bucket length of that op
    // By key: what was reliable in the rank's latest op of this bucket, and the bucket's length.
    std::map<std::uint32_t, std::pair<std::uint32_t, std::vector<CoordRun>>> reliable_;
    Seq first_timed_;    // ops before this one have no timer: they have closed and ended
    Seq told_from_ = 0;  // earlier ones had no timer at the last take_open()
    std::size_t in_flight_ = 0;
    std::optional<Seq> skipped_to_;  // the latest skip, unless ops were in flight
    bool contributing_ = true, news_ = false;
    std::vector<OpReport> reports_;
};

}  // namespace tailcut
