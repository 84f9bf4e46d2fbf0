// The rotation with NEON: strides 1 to 32 run in registers on 64 coordinates at a time, then passes of up to
// eightfold.
//
// Fused multiply-adds with 1 or -1 round like the additions that they replace.
#include "codec/rotate_kernels.hpp"

#if defined(__aarch64__)

#include <arm_neon.h>

namespace tailcut::codec {
namespace {

// The sign bits of four coordinates, of which k is the first.
inline float32x4_t flip(float32x4_t v, const std::uint64_t* signs, std::size_t k) {
    const auto bits = static_cast<std::uint32_t>(signs[k / 64] >> (k % 64));
    const int32x4_t shifts = {31, 30, 29, 28};
    const uint32x4_t top = vandq_u32(vshlq_u32(vdupq_n_u32(bits), shifts), vdupq_n_u32(0x80000000));
    return vreinterpretq_f32_u32(veorq_u32(vreinterpretq_u32_f32(v), top));
}

template <std::size_t n>
inline void across(float32x4_t (&v)[n]) {
    for (std::size_t h = 1; h < n; h *= 2)
        for (std::size_t k = 0; k < n; ++k)
            if (!(k & h)) {
                const float32x4_t a = v[k], b = v[k + h];
                v[k] = vaddq_f32(a, b);
                v[k + h] = vsubq_f32(a, b);
            }
}

// Strides 1 and 2: the partner's value plus or minus the lane's own.
inline float32x4_t within(float32x4_t v) {
    const float32x4_t odd = {1, -1, 1, -1}, upper = {1, 1, -1, -1};
    v = vfmaq_f32(vrev64q_f32(v), v, odd);
    return vfmaq_f32(vextq_f32(v, v, 2), v, upper);
}

void strides_to_32(float* x, std::size_t n) {
    for (std::size_t base = 0; base < n; base += 64) {
        float32x4_t v[16];
        for (std::size_t r = 0; r < 16; ++r) v[r] = within(vld1q_f32(x + base + 4 * r));
        across(v);
        for (std::size_t r = 0; r < 16; ++r) vst1q_f32(x + base + 4 * r, v[r]);
    }
}

// Strides h to h·radix/2.
template <std::size_t radix>
void pass(float* x, std::size_t n, std::size_t h) {
    for (std::size_t base = 0; base < n; base += radix * h)
        for (std::size_t k = base; k < base + h; k += 4) {
            float32x4_t v[radix];
            for (std::size_t r = 0; r < radix; ++r) v[r] = vld1q_f32(x + k + r * h);
            across(v);
            for (std::size_t r = 0; r < radix; ++r) vst1q_f32(x + k + r * h, v[r]);
        }
}

void butterflies(float* x, std::size_t n) {
    strides_to_32(x, n);
    std::size_t h = 64;
    for (; n / h >= 8; h *= 8) pass<8>(x, n, h);
    if (n / h == 4) pass<4>(x, n, h);
    if (n / h == 2) pass<2>(x, n, h);
}

}  // namespace

void rotate_vector(const float* in, float* out, std::size_t n, const std::uint64_t* signs, float factor,
                   SumLanes& sums) {
    constexpr std::size_t kVectors = kSumLanes / 4;
    float32x4_t squares[kVectors], fourths[kVectors];
    for (std::size_t l = 0; l < kVectors; ++l) {
        squares[l] = vld1q_f32(sums.squares + 4 * l);
        fourths[l] = vld1q_f32(sums.fourths + 4 * l);
    }
    for (std::size_t base = 0; base < n; base += kSumLanes)
        for (std::size_t l = 0; l < kVectors; ++l) {
            const std::size_t k = base + 4 * l;
            const float32x4_t v = vld1q_f32(in + k), square = vmulq_f32(v, v);
            squares[l] = vaddq_f32(squares[l], square);
            fourths[l] = vaddq_f32(fourths[l], vmulq_f32(square, square));
            vst1q_f32(out + k, flip(v, signs, k));
        }
    for (std::size_t l = 0; l < kVectors; ++l) {
        vst1q_f32(sums.squares + 4 * l, squares[l]);
        vst1q_f32(sums.fourths + 4 * l, fourths[l]);
    }
    butterflies(out, n);
    for (std::size_t k = 0; k < n; k += 4) vst1q_f32(out + k, vmulq_n_f32(vld1q_f32(out + k), factor));
}

void unrotate_vector(float* work, float* out, std::size_t n, const std::uint64_t* signs, float factor) {
    butterflies(work, n);
    for (std::size_t k = 0; k < n; k += 4)
        vst1q_f32(out + k, flip(vmulq_n_f32(vld1q_f32(work + k), factor), signs, k));
}

}  // namespace tailcut::codec

#endif
