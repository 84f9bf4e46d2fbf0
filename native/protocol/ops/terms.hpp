// What a rank decides for each of its ops: how long it may take, how coarse its values are, and how many
// ranks may send at once.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/types.hpp"
#include "protocol/reports/fields.hpp"

namespace tailcut {

// When the stages of an op end: at the latest, and early.
struct Bounds {
    Duration scatter = 0;      // t_B: SCATTER closes this long after the entry of the ceil(N/2)-th rank
    Duration scatter_cap = 0;  // SCATTER closes at the latest this long after the first entry
    Duration gather = 0;  // t_B: the op ends this long after SCATTER's t_B, both from the majority's entry
    Duration scatter_grace = 0;  // t_C: SCATTER closes this long after all non-silent ranks' last parts came
    Duration gather_grace = 0;   // t_C: the same for GATHER, which ends the op
    Duration deadline = 0;       // the op ends at the latest this long after the rank's own entry
    // SCATTER leaves out ranks that have not entered this long after all others delivered; 0: it awaits them as others.
    Duration absent = 0;

    template <typename Visit>
    static constexpr void visit_fields(Visit&& visit) {
        visit("scatter_s", &Bounds::scatter);
        visit("scatter_cap_s", &Bounds::scatter_cap);
        visit("gather_s", &Bounds::gather);
        visit("scatter_grace_s", &Bounds::scatter_grace);
        visit("gather_grace_s", &Bounds::gather_grace);
        visit("deadline_s", &Bounds::deadline);
        visit("absent_s", &Bounds::absent);
    }
};

// How coordinates travel in the codec planes.
struct Coding {
    int planes = 16;     // bits per coordinate
    bool whole = false;  // packets are so short that a trimming switch leaves them whole

    template <typename Visit>
    static constexpr void visit_fields(Visit&& visit) {
        visit("planes", &Coding::planes);
        visit("whole", &Coding::whole);
    }
};

// With more planes coding takes less than 0.005 % of the energy, and nothing is noted of it.
inline constexpr int kCarriedPlanes = 8;

// A factor for the learning rate that rank 0 offers. It holds from the first op of the period on. Scale 0:
// none.
struct LrScale {
    static constexpr Seq kPeriodOps = 64;
    static constexpr int kMostPeriodsAhead = 3;
    float scale = 0;
    std::uint16_t period = 0;  // modulo 2^16

    // Rule 11: whether the period begins soon enough after the op, so that nobody can fix the factor for
    // long. A factor that already holds may be repeated.
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

// A run of a bucket's coordinates.
struct CoordRun {
    std::uint32_t first = 0, count = 0;

    template <typename Visit>
    static constexpr void visit_fields(Visit&& visit) {
        visit("first", &CoordRun::first);
        visit("count", &CoordRun::count);
    }
};

// What a rank decides for each of its ops.
struct Terms {
    Bounds bounds;
    Coding scatter, gather;   // of its contributions, and of the mean of its shard
    std::uint8_t incast = 0;  // how many senders it asks for at once; 0: any number
    // An owner that lacks more than this share of the mean's energy sends EMPTY; 0: never.
    float skip_above = 0;
    LrScale lr_scale{};                // as far as this rank knows
    std::uint32_t key = 0;             // hash of the bucket's key; 0: it has none
    std::uint16_t loss_scale_tag = 0;  // which loss scale its values were multiplied by; 0: unknown
    bool contribute = true;            // false: the rank abstains, and only takes the means
    // The op that the caller means to enter: in another one the others are at another bucket. None: any.
    std::optional<Seq> seq{};
    // The same for the column of a grid, where one op is a part of the row's GATHER.
    Bounds column_bounds{};
    std::uint8_t column_incast = 0;
    std::vector<CoordRun> reliable{};  // what is waited for beyond the bounds, until the deadline
    // Where the op leaves its residue: what coding takes from its contribution and from its mean (docs/late.md). As long
    // as the bucket, the caller's until the op has ended; or empty.
    std::span<float> residue{};

    // What the ledger keeps.
    template <typename Visit>
    static constexpr void visit_fields(Visit&& visit) {
        visit("bounds", &Terms::bounds);
        visit("scatter", &Terms::scatter);
        visit("gather", &Terms::gather);
        visit("incast", &Terms::incast);
        visit("skip_above", &Terms::skip_above);
        visit("key", &Terms::key);
        visit("loss_scale_tag", &Terms::loss_scale_tag);
        visit("contribute", &Terms::contribute);
        visit("column_bounds", &Terms::column_bounds);
        visit("column_incast", &Terms::column_incast);
        visit("reliable", &Terms::reliable);
    }
};

}  // namespace tailcut
