// Encoding planes with AVX2: a plane's bits are gathered by movemask.
#include "codec/planes_kernels.hpp"

#if defined(__x86_64__)

#include <immintrin.h>

#include "base/types.hpp"

#define TAILCUT_AVX2 [[gnu::target("avx2,fma")]]
#define TAILCUT_AVX2_INLINE [[gnu::target("avx2,fma"), gnu::always_inline]] inline

namespace tailcut::codec {
namespace {

// Omits quantize()'s bounds because packing saturates: a block's |t| is below √d, far from the end of the
// integers.
TAILCUT_AVX2_INLINE __m256i codes8(__m256 t) {
    const __m256 one = _mm256_set1_ps(1.0f);
    const __m256 s = _mm256_min_ps(_mm256_fmsub_ps(t, t, one), one);
    __m256 p = _mm256_set1_ps(kPhi[9]);
#pragma GCC unroll 9
    for (int k = 8; k >= 0; --k) p = _mm256_fmadd_ps(p, s, _mm256_set1_ps(kPhi[static_cast<std::size_t>(k)]));
    return _mm256_cvttps_epi32(_mm256_fmadd_ps(t, p, _mm256_set1_ps(32768.0f)));
}

// 32 codes, split into upper and lower bytes, in order. `middle` tells whether one of them may be the code of
// a zero: that is cheaper to test here than on the coordinates.
struct Bytes {
    __m256i upper, lower;
};

TAILCUT_AVX2_INLINE Bytes codes32(const float* z, __m256 unit, __m256i& middle) {
    __m256i q[4];
#pragma GCC unroll 4
    for (std::size_t r = 0; r < 4; ++r) q[r] = codes8(_mm256_mul_ps(_mm256_loadu_ps(z + 8 * r), unit));
    const __m256i a = _mm256_packus_epi32(q[0], q[1]), b = _mm256_packus_epi32(q[2], q[3]);
    const __m256i zero = _mm256_set1_epi16(-32768);
    middle =
        _mm256_or_si256(middle, _mm256_or_si256(_mm256_cmpeq_epi16(a, zero), _mm256_cmpeq_epi16(b, zero)));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i byte = _mm256_set1_epi16(255);
    const __m256i upper = _mm256_packus_epi16(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8));
    const __m256i lower = _mm256_packus_epi16(_mm256_and_si256(a, byte), _mm256_and_si256(b, byte));
    return {_mm256_permutevar8x32_epi32(upper, order), _mm256_permutevar8x32_epi32(lower, order)};
}

// The top bits of 64 bytes.
TAILCUT_AVX2_INLINE void put_top_bits(std::byte* to, __m256i a, __m256i b) {
    const int halves[2] = {_mm256_movemask_epi8(a), _mm256_movemask_epi8(b)};
    std::memcpy(to, halves, sizeof halves);
}

// Zeros with a tie bit get the code just below that of zero: all of its bits are inverted. Rarely called,
// after the words have been written.
TAILCUT_AVX2 [[gnu::noinline]] void break_ties(const EncodeRun& run, std::size_t g) {
    std::uint64_t tied = 0;
    for (std::size_t r = 0; r < 8; ++r) {
        const __m256 z = _mm256_loadu_ps(run.z + 64 * g + 8 * r);
        const int zeros = _mm256_movemask_ps(_mm256_cmp_ps(z, _mm256_setzero_ps(), _CMP_EQ_OQ));
        tied |= std::uint64_t{static_cast<std::uint32_t>(zeros)} << (8 * r);
    }
    tied &= mix(run.tie_key + g);
    for (int p = 0; p < run.planes; ++p) {
        std::uint64_t word;
        std::memcpy(&word, run.to.word(static_cast<std::size_t>(p), g), sizeof word);
        word ^= tied;
        std::memcpy(run.to.word(static_cast<std::size_t>(p), g), &word, sizeof word);
    }
}

template <int planes>
TAILCUT_AVX2 void encode_granules(const EncodeRun& run) {
    const __m256 unit = _mm256_set1_ps(run.unit);
    for (std::size_t g = 0; g < run.granules; ++g) {
        const float* z = run.z + 64 * g;
        __m256i middle = _mm256_setzero_si256();
        Bytes a = codes32(z, unit, middle), b = codes32(z + 32, unit, middle);
        put_top_bits(run.to.first + 8 * g, a.upper, b.upper);
        std::byte* to = run.to.second + 8 * g;
#pragma GCC unroll 7
        for (int p = 1; p < (planes < 8 ? planes : 8); ++p, to += run.to.stride) {
            a.upper = _mm256_add_epi8(a.upper, a.upper);
            b.upper = _mm256_add_epi8(b.upper, b.upper);
            put_top_bits(to, a.upper, b.upper);
        }
#pragma GCC unroll 8
        for (int p = 8; p < planes; ++p, to += run.to.stride) {
            put_top_bits(to, a.lower, b.lower);
            a.lower = _mm256_add_epi8(a.lower, a.lower);
            b.lower = _mm256_add_epi8(b.lower, b.lower);
        }
        if (!_mm256_testz_si256(middle, middle)) [[unlikely]]
            break_ties(run, g);
    }
}

template <int planes>
void encode_planes(const EncodeRun& run) {
    if (run.planes == planes) return encode_granules<planes>(run);
    if constexpr (planes > 1) encode_planes<planes - 1>(run);
}

}  // namespace

TAILCUT_AVX2 void quantize8_vector(const float* z, float unit, std::uint32_t* codes) {
    const __m256i q = codes8(_mm256_mul_ps(_mm256_loadu_ps(z), _mm256_set1_ps(unit)));
    const __m256i bounded =
        _mm256_max_epi32(_mm256_min_epi32(q, _mm256_set1_epi32(65535)), _mm256_setzero_si256());
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), bounded);
}

void encode_vector(const EncodeRun& run) { encode_planes<kMaxPlanes>(run); }

}  // namespace tailcut::codec

#endif
