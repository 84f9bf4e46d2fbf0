#include "codec/rotate.hpp"

#include <array>
#include <cmath>

#include "base/types.hpp"
#include "codec/dispatch.hpp"
#include "codec/rotate_kernels.hpp"

namespace tailcut::codec {
namespace {

using Signs = std::array<std::uint64_t, kMaxRotation / 64 + 1>;

void fill(Signs& signs, std::size_t n, std::uint64_t key) {
    for (std::size_t w = 0; w < n / 64; ++w) signs[w] = mix(key + w);
    signs[n / 64] = 0;
}

float signed_by(float value, const std::uint64_t* signs, std::size_t k) {
    return signs[k / 64] >> (k % 64) & 1 ? -value : value;
}

void butterflies(float* x, std::size_t n) {
    for (std::size_t h = 1; h < n; h *= 2)
        for (std::size_t base = 0; base < n; base += 2 * h)
            for (std::size_t k = base; k < base + h; ++k) {
                const float a = x[k], b = x[k + h];
                x[k] = a + b;
                x[k + h] = a - b;
            }
}

float fold(const float (&lanes)[kSumLanes]) {
    float sum[kSumLanes];
    for (std::size_t k = 0; k < kSumLanes; ++k) sum[k] = lanes[k];
    for (std::size_t half = kSumLanes / 2; half > 0; half /= 2)
        for (std::size_t k = 0; k < half; ++k) sum[k] += sum[k + half];
    return sum[0];
}

}  // namespace

void rotate_scalar(const float* in, float* out, std::size_t n, const std::uint64_t* signs, float factor,
                   SumLanes& sums) {
    for (std::size_t k = 0; k < n; ++k) {
        const float square = in[k] * in[k];
        sums.squares[k % kSumLanes] += square;
        sums.fourths[k % kSumLanes] += square * square;
        out[k] = signed_by(in[k], signs, k);
    }
    butterflies(out, n);
    for (std::size_t k = 0; k < n; ++k) out[k] *= factor;
}

void unrotate_scalar(float* work, float* out, std::size_t n, const std::uint64_t* signs, float factor) {
    butterflies(work, n);
    for (std::size_t k = 0; k < n; ++k) out[k] = signed_by(work[k] * factor, signs, k);
}

PowerSums rotate(std::span<const float> in, std::span<float> out, std::uint64_t key) {
    const std::size_t n = in.size();
    const float factor = 1.0f / std::sqrt(static_cast<float>(n));
    Signs signs;
    fill(signs, n, key);
    SumLanes sums;
#if defined(TAILCUT_VECTOR_KERNELS)
    if (use_vector_kernels())
        rotate_vector(in.data(), out.data(), n, signs.data(), factor, sums);
    else
#endif
        rotate_scalar(in.data(), out.data(), n, signs.data(), factor, sums);
    return {fold(sums.squares), fold(sums.fourths)};
}

void unrotate(std::span<float> work, std::span<float> out, std::uint64_t key, float scale) {
    const std::size_t n = work.size();
    const float factor = scale / std::sqrt(static_cast<float>(n));
    Signs signs;
    fill(signs, n, key);
#if defined(TAILCUT_VECTOR_KERNELS)
    if (use_vector_kernels()) return unrotate_vector(work.data(), out.data(), n, signs.data(), factor);
#endif
    unrotate_scalar(work.data(), out.data(), n, signs.data(), factor);
}

}  // namespace tailcut::codec
