// What became of the packets of an op at one rank, for the ledger (docs/ledger.md). Granules that came are sets; here
// is the rest: packets that came trimmed, and what was late and has been taken in.
#pragma once

#include <cstdint>
#include <vector>

#include "base/types.hpp"
#include "wire/header.hpp"

namespace tailcut {

// A packet of which only the first bytes came, and were used.
struct Cut {
    Seq seq = 0;  // of its op
    wire::Stage stage = wire::Stage::kScatter;
    Rank from = 0;                    // SCATTER: the rank; GATHER: the shard
    std::uint32_t first = 0;          // granule of the shard
    std::uint32_t granules = 0;       // of the whole packet
    std::uint32_t payload_bytes = 0;  // that came
    bool late = false;                // for its op
};

// Granules [first, last) that were late for op `seq`, and that op `user` has taken in (rule 9).
struct LateUse {
    Seq user = 0, seq = 0;
    wire::Stage stage = wire::Stage::kScatter;
    Rank from = 0;            // SCATTER: the rank; GATHER: the shard
    bool subtracted = false;  // it had been added to an op that others skipped
    std::uint32_t first = 0, last = 0;
};

// What a rank has done with late parts since its last report.
struct LateLog {
    std::vector<LateUse> uses;
    std::vector<Cut> cuts;
};

}  // namespace tailcut
