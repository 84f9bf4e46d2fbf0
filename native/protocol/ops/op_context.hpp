// What all ops of an endpoint share: constants, state that they may read, and resources that they use.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "codec/packet_limits.hpp"
#include "protocol/multicast/audience.hpp"
#include "protocol/ops/epochs.hpp"
#include "protocol/ops/memory.hpp"
#include "protocol/ops/ownership.hpp"
#include "protocol/ops/terms.hpp"
#include "protocol/roster.hpp"
#include "protocol/sending/destination.hpp"
#include "wire/header.hpp"

namespace tailcut {

class Attendance;
class Carry;
class Values;

// Scratch for two stripes of the codec planes, and for what is carried; it grows to the longest that was needed.
struct Scratch {
    std::vector<float> stripe, own, late, carried;
};

// Grows a scratch vector to the length that is needed.
inline std::span<float> grown(std::vector<float>& scratch, std::size_t floats) {
    if (scratch.size() < floats) scratch.resize(floats);
    return std::span(scratch).first(floats);
}

struct OpContext {
    // `limits` are by rank, followed by those of multicast if there is any.
    OpContext(const Shape& shape, wire::Codec codec, std::vector<codec::PacketLimits> limits, bool elided,
              const Epochs& epochs, const Roster& roster, const Attendance& attendance,
              const Audience& audience, Memory& memory, Values& values, Carry& carry, Scratch& scratch)
        : shape(shape),
          codec(codec),
          limits(std::move(limits)),
          gather_limits(least_of(this->limits, shape.self)),
          elided(elided),
          epochs(epochs),
          roster(roster),
          attendance(attendance),
          audience(audience),
          memory(memory),
          values(values),
          carry(carry),
          scratch(scratch) {}

    const Shape shape;
    const wire::Codec codec;
    const std::vector<codec::PacketLimits> limits;
    const codec::PacketLimits gather_limits;  // the least of all: a mean is encoded once, for everybody
    const bool elided;                        // packets carry no values (elided_values.hpp)

    const Epochs& epochs;
    const Roster& roster;
    const Attendance& attendance;
    const Audience& audience;  // who hears our multicast

    Memory& memory;
    Values& values;
    Carry& carry;  // what is late
    Scratch& scratch;

    bool carries(const Plan& plan) const;  // rule 9 applies to the op
    // Of a bucket that is cut in the epoch of its op.
    Plan plan(Seq seq, BucketId bucket) const { return {shape, seq, bucket, epochs.at(seq)}; }

    const codec::PacketLimits& limits_to(Destination to) const { return limits[to.place(shape.ranks)]; }
    // Granules of a full packet. The codec raw ignores the coding.
    std::uint32_t granules(const codec::PacketLimits& within, const Coding& coding) const {
        return std::max(1u, within.granules(codec, coding.planes, coding.whole));
    }

private:
    static codec::PacketLimits least_of(const std::vector<codec::PacketLimits>& limits, Rank self) {
        codec::PacketLimits least = limits[self];
        for (std::size_t place = 0; place < limits.size(); ++place)
            if (place != self) least.lower_to(limits[place]);
        return least;
    }
};

}  // namespace tailcut
