// How many contributions one in a column stands for, as its header says it. fp16 is exact for rows of up to 2,048 ranks. With
// planes the number is less than that of ranks by what quantization took from them, and is rounded. That biases nothing,
// because a packet then has the mean of these contributions and not their sum.
#pragma once

#include "codec/gains.hpp"
#include "wire/header.hpp"

namespace tailcut {

inline void put_count(float count, wire::Header& header) { header.stands_for = codec::to_half(count); }

// What is no number, or a negative one, counts nothing.
inline float count_of(const wire::Header& header) {
    const bool sound = codec::is_finite_half(header.stands_for) && !(header.stands_for & 0x8000);
    return sound ? codec::from_half(header.stands_for) : 0;
}

}  // namespace tailcut
