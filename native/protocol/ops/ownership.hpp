// Who owns which shard of an op (rule 7).
#pragma once

#include <compare>
#include <cstdint>

#include "base/types.hpp"
#include "protocol/ops/layout.hpp"
#include "wire/header.hpp"

namespace tailcut {

struct Shape {
    Rank self = 0;
    Rank ranks = 1;
    std::uint64_t seed = 0;
};

// What ranks state about the bucket of an op, and must agree on.
struct BucketId {
    std::uint32_t length = 0;  // coordinates
    std::uint32_t key = 0;     // hash of the bucket's key; 0: it has none
    std::uint16_t epoch = 0;   // in which it is cut

    auto operator<=>(const BucketId&) const = default;
};

inline BucketId bucket_of(const wire::Header& header) {
    return {header.bucket_len, header.key, header.epoch};
}

// What all ranks know alike of one op.
struct Plan {
    Plan(const Shape& shape, Seq seq, BucketId bucket, const Epoch& epoch = kFirstEpoch)
        : seq(seq),
          bucket(bucket),
          layout{bucket.length, shape.ranks, epoch.owners(), rotation_of(shape, seq, bucket.key)},
          self(shape.self),
          epoch(epoch) {}

    const Seq seq;
    const BucketId bucket;
    const Layout layout;
    const Rank self;
    const Epoch& epoch;

    Rank owner(Rank shard) const { return static_cast<Rank>((shard + layout.rotation) % layout.ranks); }
    Rank shard_of(Rank owner) const {
        return static_cast<Rank>((owner + layout.ranks - layout.rotation) % layout.ranks);
    }
    Rank members() const { return epoch.member_count(layout.ranks); }
    Rank own_shard() const { return shard_of(self); }

private:
    // A bucket with a key has the same owners in every op, so that what is carried stays with its owner.
    // Without a key they follow from seq. It is hashed, because plain rotation always picks the same owners
    // when `ranks` divides the buckets of a step.
    static Rank rotation_of(const Shape& shape, Seq seq, std::uint32_t key) {
        const std::uint64_t address = key != 0 ? std::uint64_t{1} << 32 | key : seq;
        return static_cast<Rank>(mix(mix(shape.seed) ^ address) % shape.ranks);
    }
};

}  // namespace tailcut
