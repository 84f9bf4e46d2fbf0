// Who owns which shard of an op (rule 7).
#pragma once

#include <cstdint>

#include "base/types.hpp"

namespace tailcut {

struct Shape {
    Rank self = 0;
    Rank ranks = 1;
    std::uint64_t seed = 0;

    // Rule 7: hashed, because plain rotation always picks the same owners when `ranks` divides the buckets of
    // a step.
    Rank rotation(Seq seq) const { return static_cast<Rank>(mix(mix(seed) ^ seq) % ranks); }
    Rank owner(Rank shard, Seq seq) const { return static_cast<Rank>((shard + rotation(seq)) % ranks); }
    Rank shard_of(Rank owner, Seq seq) const {
        return static_cast<Rank>((owner + ranks - rotation(seq)) % ranks);
    }
};

}  // namespace tailcut
