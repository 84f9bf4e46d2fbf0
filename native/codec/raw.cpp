#include "codec/raw.hpp"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

namespace tailcut::codec {
namespace {

constexpr std::size_t kLane = 32;  // coordinates summed in registers

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

// One lane. `n` coordinates of it are there; the compiler sees a constant for all but the last.
[[gnu::always_inline]] inline std::uint32_t mean_lane(std::span<const float* const> sources, std::size_t at,
                                                      std::size_t n, float divisor, float factor,
                                                      float* out) {
    float sum[kLane] = {};
    std::memcpy(sum, sources[0] + at, n * sizeof(float));
    for (std::size_t s = 1; s < sources.size(); ++s) {
        float addend[kLane] = {};
        std::memcpy(addend, sources[s] + at, n * sizeof(float));
        for (std::size_t k = 0; k < kLane; ++k) sum[k] += addend[k];
    }
    // For a power of two the product is the quotient, bit for bit.
    for (std::size_t k = 0; k < kLane; ++k) sum[k] = factor != 0 ? sum[k] * factor : sum[k] / divisor;
    std::memcpy(out + at, sum, n * sizeof(float));
    return non_finite(sum, kLane);
}

[[gnu::always_inline]] inline bool mean_body(std::span<const float* const> sources, std::size_t count,
                                             float* out) {
    const auto divisor = static_cast<float>(sources.size());
    const float factor = std::has_single_bit(sources.size()) ? 1.0f / divisor : 0.0f;
    std::uint32_t found = 0;
    std::size_t at = 0;
    for (; at + kLane <= count; at += kLane) found |= mean_lane(sources, at, kLane, divisor, factor, out);
    if (at < count) found |= mean_lane(sources, at, count - at, divisor, factor, out);
    return found != 0;
}

[[gnu::always_inline]] inline bool scan_body(std::span<const float> values) {
    constexpr std::size_t kTile = 1024;  // stop early, at a tile's end
    std::size_t at = 0;
    for (; at + kTile <= values.size(); at += kTile)
        if (non_finite(values.data() + at, kTile)) return true;
    return non_finite(values.data() + at, values.size() - at) != 0;
}

// The same body for wider registers. Sums and quotients of single coordinates have the same bits either way.
#if defined(__x86_64__)
[[gnu::target("avx2")]] bool mean_avx2(std::span<const float* const> sources, std::size_t count, float* out) {
    return mean_body(sources, count, out);
}
[[gnu::target("avx2")]] bool scan_avx2(std::span<const float> values) { return scan_body(values); }
bool has_avx2() {
    static const bool has = __builtin_cpu_supports("avx2");
    return has;
}
#endif

}  // namespace

bool mean_in_order(std::span<const float* const> sources, std::size_t count, float* out) {
#if defined(__x86_64__)
    if (has_avx2()) return mean_avx2(sources, count, out);
#endif
    return mean_body(sources, count, out);
}

bool has_non_finite(std::span<const float> values) {
#if defined(__x86_64__)
    if (has_avx2()) return scan_avx2(values);
#endif
    return scan_body(values);
}

}  // namespace tailcut::codec
