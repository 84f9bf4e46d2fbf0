// The means of an op that the owners of the other shards send: which granules have come, and when. This is
// the counterpart of OwnedShard at a receiver.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "protocol/ops/granules.hpp"
#include "protocol/ops/stage_clocks.hpp"
#include "protocol/values/values.hpp"
#include "wire/header.hpp"

namespace tailcut {

class ReceivedMeans {
public:
    ReceivedMeans(const OpContext& context, const Plan& plan, Block memory);

    // From now on values go to the bucket. Those that came before are moved there.
    void enter(Time now, std::span<float> bucket);
    std::optional<wire::Reject> place(Time now, const wire::Header& header,
                                      std::span<const std::byte> payload);
    void owner_left(Rank owner, Time now);  // it will send nothing more; the rest counts as EMPTY
    void end();                             // what did not come is zero
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

private:
    const OpContext& context_;
    const Plan plan_;
    std::unique_ptr<Means> values_;
    std::vector<GranuleSet> answered_, held_;  // by shard
    std::uint32_t answered_granules_ = 0;
    std::vector<Time> last_at_;  // by owner
    LastParts last_parts_;
};

}  // namespace tailcut
