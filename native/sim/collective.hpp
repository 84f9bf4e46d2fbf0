// AllReduce as other systems do it, as data dependencies only: what a rank sends when it enters an op and
// when a message comes. It has no clock and no network: it is told what happened, and says what to send next.
//
// | algorithm | messages a rank sends                | bytes a rank sends | steps one after the other |
// |-----------|--------------------------------------|--------------------|---------------------------|
// | ring      | 2(N-1) parts of a shard, to the next | 2(N-1)/N · S       | 2(N-1)                    |
// | tree      | up to 3/2 buckets, to 3 neighbours   | 2 S on average     | 4 log2(N)                 |
//
// Buckets travel in parts, so that steps overlap: a part is sent on as soon as it is there, whatever the
// other parts do.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/types.hpp"

namespace tailcut::sim {

enum class Algorithm : std::uint8_t { kRing, kTree };

struct Message {
    Rank to;
    std::uint64_t bytes;
    std::uint32_t op, step, part;
};

class Collective {
public:
    virtual ~Collective() = default;
    // A rank enters its next op. Appends what it sends; returns whether the op has already ended at the rank.
    virtual bool enter(Rank rank, std::uint32_t op, std::vector<Message>& out) = 0;
    // A message of an op that the rank is in has come. Appends what the rank sends; returns whether the op
    // has ended at it.
    virtual bool receive(Rank rank, const Message& message, std::vector<Message>& out) = 0;
};

std::unique_ptr<Collective> make_collective(Algorithm algorithm, Rank ranks, std::uint64_t bucket_bytes,
                                            std::uint64_t part_bytes);

}  // namespace tailcut::sim
