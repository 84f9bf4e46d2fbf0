// What a rank decides for each of its ops: how long it may take, how coarse its values are, how many may send at once.
#pragma once

#include <cstdint>

#include "base/types.hpp"

namespace tailcut {

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
    std::uint32_t key = 0;             // hash of the bucket's key; 0: it has none
    std::uint16_t loss_scale_tag = 0;  // which loss scale its values were multiplied by; 0: none is known
    // The same for the column of a grid, where one op is a part of the row's GATHER
    Bounds column_bounds{};
    std::uint8_t column_incast = 0;
};

}  // namespace tailcut
