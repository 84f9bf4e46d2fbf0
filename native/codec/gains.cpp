#include "codec/gains.hpp"

#include <algorithm>
#include <bit>
#include <cmath>

#include "base/types.hpp"
#include "codec/planes_kernels.hpp"

namespace tailcut::codec {
namespace {

constexpr std::size_t kStrata = 64;  // eight neighbours are sampled from each: 512 coordinates

}  // namespace

std::uint16_t to_half(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const auto sign = static_cast<std::uint16_t>(bits >> 16 & 0x8000);
    const std::uint32_t magnitude = bits & 0x7FFFFFFF;
    if (magnitude >= 0x47800000)  // 65536 and beyond, Inf, NaN
        return static_cast<std::uint16_t>(sign | (magnitude > 0x7F800000 ? 0x7E00 : 0x7C00));
    // Below 2^-14 the last place of a half is 2^-24: adding 0.5 in fp32 rounds to it.
    if (magnitude < 0x38800000)
        return static_cast<std::uint16_t>(
            sign | (std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3F000000));
    const std::uint32_t rounded = magnitude + 0xFFF + (magnitude >> 13 & 1) - 0x38000000;
    return static_cast<std::uint16_t>(sign | rounded >> 13);
}

float from_half(std::uint16_t half) {
    const std::uint32_t sign = std::uint32_t{half & 0x8000u} << 16, rest = half & 0x7FFF;
    if (rest >= 0x7C00) return std::bit_cast<float>(sign | 0x7F800000 | (rest & 0x3FF) << 13);
    if (rest < 0x400) {  // denormal: rest · 2^-24
        const float value = static_cast<float>(rest) * 0x1p-24f;
        return sign ? -value : value;
    }
    return std::bit_cast<float>(sign | ((rest << 13) + 0x38000000));
}

Gains measure_gains(std::span<const float> z, const Scale& scale, std::uint64_t key, int planes) {
    // Samples eight neighbours at a random place of each stratum. The signs of a Hadamard row repeat with
    // periods of powers of two, so a regular sample of a lattice would see only one of its values.
    const Centroids& means = centroids();
    const int most = std::min(planes, kMeasuredBits);
    const std::size_t strata = std::min(kStrata, z.size() / 8), stratum = z.size() / strata;
    std::array<double, kMeasuredBits + 1> held{}, squares{};
    double whole = 0;
    for (std::size_t s = 0; s < strata; ++s) {
        const std::size_t at = s * stratum + mix(mix(key ^ 0x6761696E) + s) % (stratum / 8) * 8;
        std::uint32_t codes[8];
        quantize8(z.data() + at, scale.unit, codes);
        for (std::size_t k = 0; k < 8; ++k) {
            const float t = z[at + k] * scale.unit;
            const double y = double{t} * kCodeUnit;
            whole += y * y;
            // Centroids::of without a branch on the sign, which would be mispredicted half of the time.
            const std::uint32_t negative = (codes[k] >> (kMaxPlanes - 1)) - 1;
            const std::uint32_t magnitude = (codes[k] ^ negative) & 0x7FFF;
            const double towards =
                std::bit_cast<double>(std::bit_cast<std::uint64_t>(y) ^ std::uint64_t{negative} << 63);
            for (int b = 1; b <= most; ++b) {
                const double mean = means.means[(1u << (b - 1)) + (magnitude >> (kMaxPlanes - b))];
                held[static_cast<std::size_t>(b)] += towards * mean;
                squares[static_cast<std::size_t>(b)] += mean * mean;
            }
        }
    }
    Gains gains;
    if (!(whole > 0)) return gains;
    for (std::size_t b = 1; b <= static_cast<std::size_t>(most); ++b) {
        const double r = held[b] / (whole * (1 - kDistortion[b])) - 1;
        gains.deviation[b] = to_half(static_cast<float>(std::clamp(r, -0.96875, 4095.0)));
        const double w = held[b] / whole;
        gains.noise[b] = w > 0 ? static_cast<float>(std::max(0.0, squares[b] / whole / (w * w) - 1)) : 0;
    }
    if (gains.deviation[1] <= kNominalGain)
        gains.deviation[1] = kNominalGain + 1;  // stands for zero, and says that the gains were measured
    return gains;
}

}  // namespace tailcut::codec
