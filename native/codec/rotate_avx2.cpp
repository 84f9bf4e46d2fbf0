// The rotation with AVX2: strides 1 to 32 run in registers on 64 coordinates at a time, then passes of up to
// sixteen-fold run in L1. A block larger than L1 is processed tile by tile, and a last pass joins the tiles.
//
// Fused multiply-adds with 1 or -1 round like the additions that they replace, and use ports that additions
// leave idle.
#include "codec/rotate_kernels.hpp"

#if defined(__x86_64__)

#include <immintrin.h>

#include <bit>
#include <cstring>
#include <utility>

#define TAILCUT_AVX2 [[gnu::target("avx2,fma,prfchw")]]
#define TAILCUT_AVX2_INLINE [[gnu::target("avx2,fma,prfchw"), gnu::always_inline]] inline

namespace tailcut::codec {
namespace {

constexpr std::size_t kTile = 4096;
constexpr std::size_t kLine = 16;  // floats of a cache line

// What happens to a coordinate before the first butterfly or after the last one.
enum class Edge { kNone, kSigns, kScale, kScaleSigns };

struct Pass {
    const std::uint64_t* signs;  // of the pass's first coordinate
    float factor;
};

// Prefetches cache lines at an even pace, with every 64 coordinates of every pass, so that memory works while
// the processor computes in the caches. A block needs four lines per 64 coordinates.
//
// WriteAhead prefetches `out`. It is done before the last pass, and it stops at the block's end because what
// follows may belong to another thread.
class WriteAhead {
public:
    WriteAhead(const float* from, const float* end) : at_(from), end_(end) {}

    TAILCUT_AVX2_INLINE void in_first_pass() {
        line();
        line();
    }
    TAILCUT_AVX2_INLINE void in_middle_pass() { line(); }
    TAILCUT_AVX2_INLINE void in_last_pass() {}

private:
    TAILCUT_AVX2_INLINE void line() {
        if (at_ < end_) __builtin_prefetch(at_, 1);
        at_ += kLine;
    }

    const float* at_;
    const float* end_;
};

// Prefetches `in` as well. During the last pass it prefetches the block that follows in memory, which no
// hardware predicts. If no block follows, this does no harm: prefetches never fault.
class ReadAhead {
public:
    ReadAhead(const float* in, float* out, std::size_t n) : at_(in + kLead), out_(out + kTile, out + n) {}

    TAILCUT_AVX2_INLINE void in_first_pass() {
        line();
        out_.in_first_pass();
    }
    TAILCUT_AVX2_INLINE void in_middle_pass() {
        line();
        out_.in_middle_pass();
    }
    TAILCUT_AVX2_INLINE void in_last_pass() { line(); }

private:
    // The passes before the last prefetch three quarters of a block of 2^15, so the lead is the remaining
    // quarter, and a page more.
    static constexpr std::size_t kLead = 2 * kTile + 1024;

    TAILCUT_AVX2_INLINE void line() {
        _mm_prefetch(reinterpret_cast<const char*>(at_), _MM_HINT_T1);
        at_ += kLine;
    }

    const float* at_;
    WriteAhead out_;
};

TAILCUT_AVX2_INLINE __m256 flip(__m256 v, const std::uint64_t* signs, std::size_t k) {
    std::int32_t word;
    std::memcpy(&word, reinterpret_cast<const char*>(signs) + k / 8, sizeof word);
    const __m256i shifts = _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24);
    const __m256i top = _mm256_sllv_epi32(_mm256_set1_epi32(word), shifts);
    return _mm256_xor_ps(v, _mm256_and_ps(_mm256_castsi256_ps(top), _mm256_set1_ps(-0.0f)));
}

template <Edge edge>
TAILCUT_AVX2_INLINE void store(float* out, std::size_t k, __m256 v, const Pass& pass) {
    if constexpr (edge == Edge::kScale || edge == Edge::kScaleSigns)
        v = _mm256_mul_ps(v, _mm256_set1_ps(pass.factor));
    if constexpr (edge == Edge::kScaleSigns) v = flip(v, pass.signs, k);
    _mm256_storeu_ps(out + k, v);
}

template <std::size_t n>
TAILCUT_AVX2_INLINE void across(__m256 (&v)[n]) {
#pragma GCC unroll 4
    for (std::size_t h = 1; h < n; h *= 2)
#pragma GCC unroll 16
        for (std::size_t k = 0; k < n; ++k)
            if (!(k & h)) {
                const __m256 a = v[k], b = v[k + h];
                v[k] = _mm256_add_ps(a, b);
                v[k + h] = _mm256_fnmadd_ps(b, _mm256_set1_ps(1.0f), a);  // a - b
            }
}

// Strides 1, 2, 4: the partner's value plus or minus the lane's own.
TAILCUT_AVX2_INLINE __m256 within(__m256 v) {
    const __m256 odd = _mm256_setr_ps(1, -1, 1, -1, 1, -1, 1, -1);
    const __m256 pairs = _mm256_setr_ps(1, 1, -1, -1, 1, 1, -1, -1);
    const __m256 upper = _mm256_setr_ps(1, 1, 1, 1, -1, -1, -1, -1);
    v = _mm256_fmadd_ps(v, odd, _mm256_permute_ps(v, 0xB1));
    v = _mm256_fmadd_ps(v, pairs, _mm256_permute_ps(v, 0x4E));
    return _mm256_fmadd_ps(v, upper, _mm256_permute2f128_ps(v, v, 0x01));
}

// Strides 1 to 32.
template <Edge before, Edge after, typename Ahead>
TAILCUT_AVX2 void first_pass(const float* in, float* out, std::size_t n, const Pass& pass, SumLanes* sums,
                             Ahead& shared) {
    Ahead ahead = shared;  // a copy, so that it stays in registers
    __m256 squares[2], fourths[2];
    if constexpr (before == Edge::kSigns)
        for (std::size_t l = 0; l < 2; ++l) {
            squares[l] = _mm256_loadu_ps(sums->squares + 8 * l);
            fourths[l] = _mm256_loadu_ps(sums->fourths + 8 * l);
        }
    for (std::size_t base = 0; base < n; base += 64) {
        ahead.in_first_pass();
        __m256 v[8];
#pragma GCC unroll 8
        for (std::size_t r = 0; r < 8; ++r) {
            v[r] = _mm256_loadu_ps(in + base + 8 * r);
            if constexpr (before == Edge::kSigns) {
                const __m256 square = _mm256_mul_ps(v[r], v[r]);
                squares[r % 2] = _mm256_add_ps(squares[r % 2], square);
                fourths[r % 2] = _mm256_add_ps(fourths[r % 2], _mm256_mul_ps(square, square));
                v[r] = flip(v[r], pass.signs, base + 8 * r);
            }
            v[r] = within(v[r]);
        }
        across(v);
#pragma GCC unroll 8
        for (std::size_t r = 0; r < 8; ++r) store<after>(out, base + 8 * r, v[r], pass);
    }
    shared = ahead;
    if constexpr (before == Edge::kSigns)
        for (std::size_t l = 0; l < 2; ++l) {
            _mm256_storeu_ps(sums->squares + 8 * l, squares[l]);
            _mm256_storeu_ps(sums->fourths + 8 * l, fourths[l]);
        }
}

// Strides h to h·radix/2.
template <std::size_t radix, Edge after, typename Ahead>
TAILCUT_AVX2 void pass_of(const float* in, float* out, std::size_t n, std::size_t h, const Pass& pass,
                          Ahead& shared) {
    Ahead ahead = shared;
    for (std::size_t base = 0; base < n; base += radix * h)
        for (std::size_t k = base; k < base + h; k += 8) {
            if constexpr (after == Edge::kNone)
                ahead.in_middle_pass();
            else
                ahead.in_last_pass();
            __m256 v[radix];
#pragma GCC unroll 16
            for (std::size_t r = 0; r < radix; ++r) v[r] = _mm256_loadu_ps(in + k + r * h);
            across(v);
#pragma GCC unroll 16
            for (std::size_t r = 0; r < radix; ++r) store<after>(out, k + r * h, v[r], pass);
        }
    shared = ahead;
}

template <Edge after, typename Ahead>
void any_pass(std::size_t radix, const float* in, float* out, std::size_t n, std::size_t h, const Pass& pass,
              Ahead& ahead) {
    if (radix == 2) pass_of<2, after>(in, out, n, h, pass, ahead);
    if (radix == 4) pass_of<4, after>(in, out, n, h, pass, ahead);
    if (radix == 8) pass_of<8, after>(in, out, n, h, pass, ahead);
    if (radix == 16) pass_of<16, after>(in, out, n, h, pass, ahead);
}

// All strides of n coordinates. The last pass writes to `out`, earlier ones to `work`.
template <Edge before, Edge after, typename Ahead>
void transform(const float* in, float* work, float* out, std::size_t n, const Pass& pass, SumLanes* sums,
               Ahead& ahead) {
    if (n == 64) return first_pass<before, after>(in, out, n, pass, sums, ahead);
    if (n > 2 * kTile) {
        for (std::size_t at = 0; at < n; at += kTile)
            transform<before, Edge::kNone>(in + at, work + at, work + at, kTile,
                                           {pass.signs + at / 64, pass.factor}, sums, ahead);
        std::size_t h = kTile;
        for (; n / h > 16; h *= 8) any_pass<Edge::kNone>(8, work, work, n, h, pass, ahead);
        return any_pass<after>(n / h, work, out, n, h, pass, ahead);
    }
    first_pass<before, Edge::kNone>(in, work, n, pass, sums, ahead);
    std::size_t h = 64;
    if (n / h > 16) {
        const std::size_t radix = n / h > 64 ? 16 : 8;
        any_pass<Edge::kNone>(radix, work, work, n, h, pass, ahead);
        h *= radix;
    }
    any_pass<after>(n / h, work, out, n, h, pass, ahead);
}

}  // namespace

void rotate_vector(const float* in, float* out, std::size_t n, const std::uint64_t* signs, float factor,
                   SumLanes& sums) {
    ReadAhead ahead(in, out, n);
    transform<Edge::kSigns, Edge::kScale>(in, out, out, n, {signs, factor}, &sums, ahead);
}

void unrotate_vector(float* work, float* out, std::size_t n, const std::uint64_t* signs, float factor) {
    WriteAhead ahead(out, out + n);
    transform<Edge::kNone, Edge::kScaleSigns>(work, work, out, n, {signs, factor}, nullptr, ahead);
}

}  // namespace tailcut::codec

#endif
