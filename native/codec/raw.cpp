#include "codec/raw.hpp"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

namespace tailcut::codec {
namespace {

// Vector extensions of the compiler: the same source becomes one AVX2 or two SSE operations. These types do
// not cross a call.
using Floats = float __attribute__((vector_size(32)));
using Words = std::int32_t __attribute__((vector_size(32)));
constexpr std::size_t kWidth = 8;
constexpr std::size_t kLane = 4 * kWidth;  // coordinates summed in registers

[[gnu::always_inline]] inline void load(const float* from, Floats& to) { std::memcpy(&to, from, sizeof to); }

[[gnu::always_inline]] inline std::uint32_t non_finite(const float* values, std::size_t n) {
    constexpr std::uint32_t kExponent = 0x7F800000;
    std::uint32_t found = 0;
    for (std::size_t k = 0; k < n; ++k) {
        std::uint32_t bits;
        std::memcpy(&bits, values + k, sizeof bits);
        found |= (bits & kExponent) == kExponent ? 1u : 0u;
    }
    return found;
}

// The scalar twin, for the coordinates that do not fill a lane.
[[gnu::always_inline]] inline bool mean_scalar(std::span<const float* const> sources, float divisor,
                                               std::size_t at, std::size_t count, float* out) {
    for (std::size_t k = at; k < count; ++k) {
        float sum = sources[0][k];
        for (std::size_t s = 1; s < sources.size(); ++s) sum += sources[s][k];
        out[k] = sum / divisor;
    }
    return non_finite(out + at, count - at) != 0;
}

template <bool power_of_two>
[[gnu::always_inline]] inline bool mean_lanes(std::span<const float* const> sources, float divisor,
                                              std::size_t count, float* out) {
    const float factor = 1.0f / divisor;
    Words found = {};
    std::size_t at = 0;
    for (; at + kLane <= count; at += kLane) {
        Floats sum[4], addend;
#pragma GCC unroll 4
        for (std::size_t v = 0; v < 4; ++v) load(sources[0] + at + v * kWidth, sum[v]);
        for (std::size_t s = 1; s < sources.size(); ++s)
#pragma GCC unroll 4
            for (std::size_t v = 0; v < 4; ++v) {
                load(sources[s] + at + v * kWidth, addend);
                sum[v] += addend;
            }
#pragma GCC unroll 4
        for (std::size_t v = 0; v < 4; ++v) {
            // Multiplying gives the same bits as dividing if the divisor is a power of two.
            sum[v] = power_of_two ? sum[v] * factor : sum[v] / divisor;
            Words bits;
            std::memcpy(&bits, &sum[v], sizeof bits);
            found |= (bits & 0x7F800000) == 0x7F800000;
            std::memcpy(out + at + v * kWidth, &sum[v], sizeof sum[v]);
        }
    }
    bool any = mean_scalar(sources, divisor, at, count, out);
    for (std::size_t k = 0; k < kWidth; ++k) any |= found[k] != 0;
    return any;
}

[[gnu::always_inline]] inline bool mean_body(std::span<const float* const> sources, float divisor,
                                             std::size_t count, float* out) {
    const bool power_of_two = (std::bit_cast<std::uint32_t>(divisor) & 0x7FFFFF) == 0;
    return power_of_two ? mean_lanes<true>(sources, divisor, count, out)
                        : mean_lanes<false>(sources, divisor, count, out);
}

[[gnu::always_inline]] inline bool scan_body(std::span<const float> values) {
    constexpr std::size_t kTile = 1024;  // a non-finite value is noticed at a tile's end
    std::size_t at = 0;
    for (; at + kTile <= values.size(); at += kTile)
        if (non_finite(values.data() + at, kTile)) return true;
    return non_finite(values.data() + at, values.size() - at) != 0;
}

// The same body compiled for wider registers. Per-coordinate sums and quotients have the same bits either
// way.
#if defined(__x86_64__)
[[gnu::target("avx2")]] bool mean_avx2(std::span<const float* const> sources, float divisor,
                                       std::size_t count, float* out) {
    return mean_body(sources, divisor, count, out);
}
[[gnu::target("avx2")]] bool scan_avx2(std::span<const float> values) { return scan_body(values); }
bool has_avx2() {
    static const bool has = __builtin_cpu_supports("avx2");
    return has;
}
#endif

}  // namespace

bool mean_in_order(std::span<const float* const> sources, float divisor, std::size_t count, float* out) {
#if defined(__x86_64__)
    if (has_avx2()) return mean_avx2(sources, divisor, count, out);
#endif
    return mean_body(sources, divisor, count, out);
}

bool has_non_finite(std::span<const float> values) {
#if defined(__x86_64__)
    if (has_avx2()) return scan_avx2(values);
#endif
    return scan_body(values);
}

}  // namespace tailcut::codec
