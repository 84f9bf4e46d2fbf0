#include "codec/raw.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace tailcut::codec {

namespace {

bool any_non_finite(const float* values, std::size_t count) {
    constexpr std::uint32_t kExponent = 0x7F800000;
    std::uint32_t found = 0;
    for (std::size_t k = 0; k < count; ++k) {
        std::uint32_t bits;
        std::memcpy(&bits, values + k, sizeof bits);
        found |= (bits & kExponent) == kExponent;
    }
    return found;
}

}  // namespace

bool mean_in_order(std::span<const float* const> sources, std::size_t count, float* out, float* copy) {
    constexpr std::size_t kTile = 1024;   // 4 KiB: sum and operand stay in L1
    float sum[kTile];
    bool non_finite = false;
    const auto divisor = static_cast<float>(sources.size());
    for (std::size_t at = 0; at < count; at += kTile) {
        const std::size_t n = std::min(kTile, count - at);
        std::memcpy(sum, sources[0] + at, n * sizeof(float));
        for (const float* source : sources.subspan(1))
            for (std::size_t k = 0; k < n; ++k) sum[k] += source[at + k];
        for (std::size_t k = 0; k < n; ++k) sum[k] /= divisor;
        non_finite |= any_non_finite(sum, n);
        std::memcpy(out + at, sum, n * sizeof(float));
        if (copy) std::memcpy(copy + at, sum, n * sizeof(float));
    }
    return non_finite;
}

bool has_non_finite(std::span<const float> values) {
    constexpr std::size_t kTile = 4096;   // stop early, at a tile's end
    for (std::size_t at = 0; at < values.size(); at += kTile)
        if (any_non_finite(values.data() + at, std::min(kTile, values.size() - at))) return true;
    return false;
}

}  // namespace tailcut::codec
