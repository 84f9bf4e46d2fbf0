// What a DATA packet carried, so that its op can make it again.
#pragma once

#include <cstdint>

#include "protocol/types.hpp"
#include "wire/header.hpp"

namespace tailcut {

struct Parcel {
    Seq seq = 0;
    std::uint32_t bucket_len = 0;
    wire::Stage stage = wire::Stage::kScatter;
    bool empty = false;
    std::uint32_t first = 0;     // SCATTER: step of the contribution; GATHER: granule of the shard
    std::uint32_t granules = 0;  // GATHER
    bool last_part = false;
};

}  // namespace tailcut
