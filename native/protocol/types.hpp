// The words that every part of the protocol shares: time, ranks, the group's shape, the layout of a bucket.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace tailcut {

using Time = std::int64_t;      // nanoseconds of whatever clock the driver uses
using Duration = std::int64_t;  // nanoseconds
using Rank = std::uint16_t;
using Seq = std::uint32_t;
using Ticket = std::uint64_t;  // names one submitted op towards the caller

inline constexpr Time kNever = std::numeric_limits<Time>::max();
inline constexpr std::uint32_t kGranule = 64;  // coordinates; arrival is kept per granule
inline constexpr Duration kMicrosecond = 1'000;
inline constexpr Duration kMillisecond = 1'000'000;

// A counter-based generator (splitmix64): randomness with an address.
constexpr std::uint64_t mix(std::uint64_t x) {
    x += 0x9E3779B97F4A7C15;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
}

struct Shape {
    Rank self = 0;
    Rank ranks = 1;
    std::uint64_t seed = 0;

    // Rule 7: hashed, because plain rotation sticks when `ranks` divides the buckets of a step.
    Rank rotation(Seq seq) const { return static_cast<Rank>(mix(mix(seed) ^ seq) % ranks); }
    Rank owner(Rank shard, Seq seq) const { return static_cast<Rank>((shard + rotation(seq)) % ranks); }
    Rank shard_of(Rank owner, Seq seq) const {
        return static_cast<Rank>((owner + ranks - rotation(seq)) % ranks);
    }
};

// A bucket is cut into one shard per rank, of equal length up to a granule. Every shard has at least one
// granule, so that a shard without coordinates is announced, delivered and answered like any other.
struct Layout {
    std::uint32_t bucket_len = 0;
    Rank ranks = 1;

    std::uint64_t shard_stride() const {
        const std::uint64_t share = (std::uint64_t{bucket_len} + ranks - 1) / ranks;
        return (share + kGranule - 1) / kGranule * kGranule;
    }
    std::uint64_t begin(Rank shard) const {
        return std::min<std::uint64_t>(shard * shard_stride(), bucket_len);
    }
    std::uint32_t length(Rank shard) const {
        return static_cast<std::uint32_t>(std::min<std::uint64_t>(shard_stride(), bucket_len - begin(shard)));
    }
    std::uint32_t granules(Rank shard) const {
        return std::max(1u,
                        static_cast<std::uint32_t>((std::uint64_t{length(shard)} + kGranule - 1) / kGranule));
    }
    // Coordinates of the granules [first, last) of a shard.
    std::uint32_t coords(Rank shard, std::uint32_t first, std::uint32_t last) const {
        const std::uint64_t len = length(shard);
        return static_cast<std::uint32_t>(std::min(len, std::uint64_t{last} * kGranule) -
                                          std::min(len, std::uint64_t{first} * kGranule));
    }
    std::uint64_t bytes() const { return std::uint64_t{bucket_len} * sizeof(float); }
};

// When the stages of an op end, at the latest and early.
struct Bounds {
    Duration scatter = 0;      // t_B: SCATTER closes this long after the entry of the ceil(N/2)-th rank,
    Duration scatter_cap = 0;  // and at the latest this long after the first
    Duration gather = 0;       // t_B: the op ends this long after the own shard has closed, or the own entry
    Duration scatter_grace = 0;  // t_C: a stage ends this long after the last parts of all ranks that are not
    Duration gather_grace = 0;   // silent have come
    Duration deadline = 0;       // the whole op, from the rank's own entry
};

// How coordinates travel in the codec planes.
struct Coding {
    int planes = 16;     // bits of a coordinate
    bool whole = false;  // packets are so short that a switch that trims leaves all of it
};

// The learning rate's factor that rank 0 offers, and from which op on: from the first of the period. Scale 0: none.
struct LrScale {
    static constexpr Seq kPeriodOps = 64;
    static constexpr int kMostPeriodsAhead = 3;
    float scale = 0;
    std::uint16_t period = 0;  // modulo 2^16

    // Rule 11: announced for so soon after the op that nobody can fix it for long. What holds already is repeated.
    bool near(Seq seq) const {
        const auto ahead = static_cast<std::int16_t>(period - static_cast<std::uint16_t>(seq / kPeriodOps));
        return ahead <= kMostPeriodsAhead;
    }
    bool newer_than(const LrScale& other) const {
        return scale > 0 && (other.scale == 0 || static_cast<std::int16_t>(period - other.period) > 0);
    }

    template <typename Visit>
    static constexpr void visit_fields(Visit&& visit) {
        visit("scale", &LrScale::scale);
        visit("period", &LrScale::period);
    }
};

// What a rank decides for each of its ops.
struct Terms {
    Bounds bounds;
    Coding scatter, gather;   // of what it contributes, and of the mean of its shard
    std::uint8_t incast = 0;  // senders at once that it asks for; 0: any number
    float skip_above = 0;  // an owner that lacks more, as a share of the mean's energy, sends EMPTY; 0: never
    LrScale lr_scale{};    // as far as this rank knows
    // The same for the column of a grid, where one op is a part of the row's GATHER
    Bounds column_bounds{};
    std::uint8_t column_incast = 0;
};

}  // namespace tailcut
