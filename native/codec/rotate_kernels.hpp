// The kernels behind rotate.hpp. `signs` holds one bit per coordinate, followed by 4 bytes that are read but
// not used.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codec/dispatch.hpp"
#include "codec/rotate.hpp"

namespace tailcut::codec {

inline constexpr std::size_t kSumLanes = 16;
struct SumLanes {
    float squares[kSumLanes] = {};
    float fourths[kSumLanes] = {};
};

void rotate_scalar(const float* in, float* out, std::size_t n, const std::uint64_t* signs, float factor,
                   SumLanes& sums);
void unrotate_scalar(float* work, float* out, std::size_t n, const std::uint64_t* signs, float factor);

#if defined(TAILCUT_VECTOR_KERNELS)
void rotate_vector(const float* in, float* out, std::size_t n, const std::uint64_t* signs, float factor,
                   SumLanes& sums);
void unrotate_vector(float* work, float* out, std::size_t n, const std::uint64_t* signs, float factor);
#endif

}  // namespace tailcut::codec
