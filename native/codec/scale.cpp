#include "codec/scale.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "codec/centroids.hpp"
#include "codec/rotate.hpp"

namespace tailcut::codec {
namespace {

// (Σx²)²/Σx⁴ is the number of coordinates that share the norm. In the worst case, equal coordinates, 4096 of
// them keep the gains within 0.003.
constexpr float kEnough = 4096;
// Between these mean squares, neither Σx² nor Σx⁴ of a block leaves the normal range.
constexpr float kLeast = 0x1p-56f, kMost = 0x1p56f;
constexpr float kFar = 5;  // in σ; cells are wide beyond it, and the code ends at 6.7
constexpr std::size_t kLanes = 16;

float largest(std::span<const float> x) {
    std::uint32_t most = 0;
    for (const float value : x) most = std::max(most, std::bit_cast<std::uint32_t>(value) & 0x7FFFFFFF);
    return std::bit_cast<float>(most);
}

void times_power_of_two(std::span<const float> in, std::span<float> out, int exponent) {
    const double factor = std::ldexp(1.0, exponent);
    for (std::size_t k = 0; k < in.size(); ++k) out[k] = static_cast<float>(in[k] * factor);
}

// The scale of coordinates that have been multiplied by 2^exponent. The unit is computed from sigma as sent,
// after rounding.
Scale scale_from(float mean_square, int exponent, bool gaussian) {
    Scale scale;
    scale.sigma = static_cast<float>(std::ldexp(double{std::sqrt(mean_square)}, -exponent));
    scale.exponent = exponent;
    scale.gaussian = gaussian;
    if (scale.sigma > 0)
        scale.unit = static_cast<float>(1.0 / (kCodeUnit * std::ldexp(double{scale.sigma}, exponent)));
    return scale;
}

Scale non_finite_scale() {
    Scale scale;
    scale.sigma = std::numeric_limits<float>::quiet_NaN();
    scale.non_finite = true;
    return scale;
}

}  // namespace

float sum_of_squares(std::span<const float> z) {
    float lanes[kLanes] = {};
    for (std::size_t k = 0; k < z.size(); k += kLanes)
        for (std::size_t l = 0; l < kLanes; ++l) lanes[l] += z[k + l] * z[k + l];
    for (std::size_t half = kLanes / 2; half > 0; half /= 2)
        for (std::size_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
    return lanes[0];
}

Scale rotate_and_scale(std::span<const float> in, std::span<float> out, std::uint64_t key) {
    const auto n = static_cast<float>(in.size());
    const auto gaussian = [](PowerSums sums) { return sums.squares * sums.squares > kEnough * sums.fourths; };
    // The rotation overwrites `in` if `out` is the same memory, so its largest value is found beforehand.
    const float most = out.data() == in.data() ? largest(in) : 0;
    const auto in_range = [&](float mean_square) { return mean_square > kLeast && mean_square < kMost; };
    if (out.data() != in.data() || (most * most > kLeast * n && most * most < kMost)) {
        const PowerSums sums = rotate(in, out, key);
        if (in_range(sums.squares / n)) return scale_from(sums.squares / n, 0, gaussian(sums));
    }
    const float peak = out.data() == in.data() ? most : largest(in);
    if (!(peak < std::numeric_limits<float>::infinity())) return non_finite_scale();
    if (peak == 0) {
        std::fill(out.begin(), out.end(), 0.0f);
        return {};
    }
    int exponent;
    std::frexp(peak, &exponent);
    times_power_of_two(in, out, -exponent);
    const PowerSums sums = rotate(out, out, key);
    return scale_from(sums.squares / n, -exponent, gaussian(sums));
}

Scale scale_of_mean(std::span<float> z, std::size_t present, bool gaussian, bool even) {
    if (present == 0) return {};
    const auto mean_square = [&] {
        const float square = sum_of_squares(z) / static_cast<float>(present);
        const float within = even ? 0 : largest(z) / kFar;
        return std::max(square, within * within);
    };
    if (const float square = mean_square(); square > kLeast && square < kMost)
        return scale_from(square, 0, gaussian && even);
    const float peak = largest(z);
    if (!(peak < std::numeric_limits<float>::infinity())) return non_finite_scale();
    if (peak == 0) return {};
    int exponent;
    std::frexp(peak, &exponent);
    times_power_of_two(z, z, -exponent);
    return scale_from(mean_square(), -exponent, gaussian && even);
}

}  // namespace tailcut::codec
