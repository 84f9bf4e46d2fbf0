// The means of an op that the owners of the other shards send: which granules have come, and when. This is
// the counterpart of OwnedShard at a receiver. Means that come after the end of the op are kept for a later one.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "protocol/ops/granules.hpp"
#include "protocol/ops/stage_clocks.hpp"
#include "protocol/values/values.hpp"
#include "wire/header.hpp"

namespace tailcut {

class ReceivedMeans {
public:
    ReceivedMeans(const OpContext& context, const Plan& plan, Block memory);

    const Plan& plan() const { return plan_; }
    std::uint16_t loss_scale_tag = 0;  // of the op

    // From now on values go to the bucket. Those that came before are moved there. `own`: the bucket holds the
    // own contribution.
    void enter(Time now, std::span<float> bucket, bool own);
    std::optional<wire::Reject> place(Time now, const wire::Header& header,
                                      std::span<const std::byte> payload);
    // The granules [first, last) that a packet answers, if it was not trimmed.
    std::pair<std::uint32_t, std::uint32_t> granules_of(const wire::Header& header) const;
    void owner_left(Rank owner, Time now);  // it will send nothing more; the rest counts as EMPTY
    void end(const StandIn& stand_in);      // fills in what did not come
    void drop();                            // after the end: none of it was used

    std::uint32_t answered_granules() const { return answered_granules_; }
    const GranuleSet& answered(Rank shard) const { return answered_[shard]; }  // came, with a mean or EMPTY
    const GranuleSet& held(Rank shard) const { return held_[shard]; }          // came with a mean
    const std::vector<GranuleSet>& held() const { return held_; }
    bool has_all(Rank shard) const { return answered_[shard].all(0, plan_.layout.granules(shard)); }
    // When the last parts of all means had come, except those of silent owners; kNever: not yet.
    Time last_parts_at() const { return last_parts_.all_at(context_.roster); }
    Time last_at(Rank owner) const { return last_at_[owner]; }  // when its latest packet came; -1: none yet
    const Energies& energies() const { return values_->energies(); }
    const Correlation& correlation() const { return values_->correlation(); }

    // ---- after the end (rule 9)
    void reopen() { values_->reopen(answered_); }  // what came trimmed counts as lacking
    bool lacking() const;                          // some of the other owners' means has not come
    std::uint64_t lacking_coords() const;
    // What add_to() would add: shards and granules [first, last).
    void each_due(const DueVisit& visit) const { values_->each_due(visit); }
    // Adds (mean - stand-in)·factor of what has come since to the result of a later op of the bucket. Returns how
    // many coordinates that was.
    std::uint64_t add_to(std::span<float> bucket, Seq user, float factor);
    void give_back(Seq user);
    void settle(Seq user);
    bool done() const { return !user_ && !lacking() && !values_->due(); }
    void forget(std::uint64_t first, std::uint64_t last) { values_->forget(first, last); }
    bool note_verdict() { return !std::exchange(verdict_, true); }  // returns whether that is news

private:
    const OpContext& context_;
    const Plan plan_;
    std::unique_ptr<Means> values_;
    std::vector<GranuleSet> answered_, held_;  // by shard
    std::uint32_t answered_granules_ = 0;
    std::vector<Time> last_at_;  // by owner
    LastParts last_parts_;
    std::optional<Seq> user_;  // the op that has used what came last
    bool verdict_ = false;     // an owner's verdict has come after the end
};

}  // namespace tailcut
