// The planes with AVX2. Encoding gathers a plane's bits by movemask; decoding transposes 8x8 bit matrices.
#include "codec/planes_kernels.hpp"

#if defined(__x86_64__)

#include <immintrin.h>

#include "protocol/types.hpp"

#define TAILCUT_AVX2 [[gnu::target("avx2")]]
#define TAILCUT_AVX2_INLINE [[gnu::target("avx2"), gnu::always_inline]] inline

namespace tailcut::codec {
namespace {

// Without quantize()'s bounds, which packing sets: a block's |t| is below its √d, far from where integers end.
TAILCUT_AVX2_INLINE __m256i quantize8(__m256 t) {
    const __m256 one = _mm256_set1_ps(1.0f);
    const __m256 s = _mm256_min_ps(_mm256_sub_ps(_mm256_mul_ps(t, t), one), one);
    __m256 p = _mm256_set1_ps(kPhi[9]);
#pragma GCC unroll 9
    for (int k = 8; k >= 0; --k)
        p = _mm256_add_ps(_mm256_mul_ps(p, s), _mm256_set1_ps(kPhi[static_cast<std::size_t>(k)]));
    return _mm256_cvttps_epi32(_mm256_add_ps(_mm256_mul_ps(t, p), _mm256_set1_ps(32768.0f)));
}

// 32 codes as their upper and their lower bytes, in order.
struct Bytes {
    __m256i upper, lower;
};

TAILCUT_AVX2_INLINE Bytes codes32(const float* z, __m256 unit, __m256& zeros) {
    __m256i q[4];
#pragma GCC unroll 4
    for (std::size_t r = 0; r < 4; ++r) {
        const __m256 v = _mm256_loadu_ps(z + 8 * r);
        zeros = _mm256_or_ps(zeros, _mm256_cmp_ps(v, _mm256_setzero_ps(), _CMP_EQ_OQ));
        q[r] = quantize8(_mm256_mul_ps(v, unit));
    }
    const __m256i a = _mm256_packus_epi32(q[0], q[1]), b = _mm256_packus_epi32(q[2], q[3]);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i byte = _mm256_set1_epi16(255);
    const __m256i upper = _mm256_packus_epi16(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8));
    const __m256i lower = _mm256_packus_epi16(_mm256_and_si256(a, byte), _mm256_and_si256(b, byte));
    return {_mm256_permutevar8x32_epi32(upper, order), _mm256_permutevar8x32_epi32(lower, order)};
}

TAILCUT_AVX2_INLINE std::uint64_t top_bits(__m256i a, __m256i b) {
    return static_cast<std::uint32_t>(_mm256_movemask_epi8(a)) |
           std::uint64_t{static_cast<std::uint32_t>(_mm256_movemask_epi8(b))} << 32;
}

TAILCUT_AVX2_INLINE void put(std::byte* at, std::uint64_t word) { std::memcpy(at, &word, sizeof word); }

// Zeros with a tie bit get the code below zero's: all bits change.
TAILCUT_AVX2 std::uint64_t tied_zeros(const float* z, std::uint64_t tie) {
    std::uint64_t zeros = 0;
    for (std::size_t r = 0; r < 8; ++r) {
        const __m256 zero = _mm256_cmp_ps(_mm256_loadu_ps(z + 8 * r), _mm256_setzero_ps(), _CMP_EQ_OQ);
        zeros |= std::uint64_t{static_cast<std::uint32_t>(_mm256_movemask_ps(zero))} << (8 * r);
    }
    return zeros & tie;
}

template <bool long_codes>
TAILCUT_AVX2 void encode_granules(const EncodeRun& run) {
    const __m256 unit = _mm256_set1_ps(run.unit);
    for (std::size_t g = 0; g < run.granules; ++g) {
        const float* z = run.z + 64 * g;
        __m256 zeros = _mm256_setzero_ps();
        Bytes a = codes32(z, unit, zeros), b = codes32(z + 32, unit, zeros);
        std::uint64_t tied = 0;
        if (_mm256_movemask_ps(zeros)) [[unlikely]]
            tied = tied_zeros(z, mix(run.tie_key + g));
        const int upper = long_codes ? 8 : run.planes;
        std::byte* to = run.to.first + 8 * g;
        put(to, top_bits(a.upper, b.upper) ^ tied);
        to = run.to.second + 8 * g;
        for (int p = 1; p < upper; ++p, to += run.to.stride) {
            a.upper = _mm256_add_epi8(a.upper, a.upper);
            b.upper = _mm256_add_epi8(b.upper, b.upper);
            put(to, top_bits(a.upper, b.upper) ^ tied);
        }
        if constexpr (long_codes)
            for (int p = 8; p < run.planes; ++p, to += run.to.stride) {
                put(to, top_bits(a.lower, b.lower) ^ tied);
                a.lower = _mm256_add_epi8(a.lower, a.lower);
                b.lower = _mm256_add_epi8(b.lower, b.lower);
            }
    }
}

// ---- decoding ---------------------------------------------------------------------------------------------

TAILCUT_AVX2_INLINE __m256i swap_bits(__m256i x, long long mask, int by) {
    const __m256i t =
        _mm256_and_si256(_mm256_xor_si256(x, _mm256_srli_epi64(x, by)), _mm256_set1_epi64x(mask));
    return _mm256_xor_si256(x, _mm256_xor_si256(t, _mm256_slli_epi64(t, by)));
}

// Each 64 bits are a matrix of 8 rows of a byte.
TAILCUT_AVX2_INLINE __m256i transpose_bits(__m256i x) {
    x = swap_bits(x, 0x00AA00AA00AA00AA, 7);
    x = swap_bits(x, 0x0000CCCC0000CCCC, 14);
    return swap_bits(x, 0x00000000F0F0F0F0, 28);
}

// Planes [plane, plane + count) of a granule as 64 bytes, the first plane's bit on top.
template <int count>
TAILCUT_AVX2_INLINE void bytes_of(const DecodeRun& run, int plane, std::size_t g, std::uint8_t* bytes) {
    __m128i row[8];
#pragma GCC unroll 8
    for (int r = 0; r < 8; ++r)
        row[7 - r] = r < count ? _mm_loadl_epi64(reinterpret_cast<const __m128i*>(
                                     run.from.word(static_cast<std::size_t>(plane + r), g)))
                               : _mm_setzero_si128();
    const __m128i a = _mm_unpacklo_epi8(row[0], row[1]), b = _mm_unpacklo_epi8(row[2], row[3]);
    const __m128i c = _mm_unpacklo_epi8(row[4], row[5]), d = _mm_unpacklo_epi8(row[6], row[7]);
    const __m128i ab = _mm_unpacklo_epi16(a, b), ab2 = _mm_unpackhi_epi16(a, b);
    const __m128i cd = _mm_unpacklo_epi16(c, d), cd2 = _mm_unpackhi_epi16(c, d);
    const __m256i x = _mm256_set_m128i(_mm_unpackhi_epi32(ab, cd), _mm_unpacklo_epi32(ab, cd));
    const __m256i y = _mm256_set_m128i(_mm_unpackhi_epi32(ab2, cd2), _mm_unpacklo_epi32(ab2, cd2));
    _mm256_store_si256(reinterpret_cast<__m256i*>(bytes), transpose_bits(x));
    _mm256_store_si256(reinterpret_cast<__m256i*>(bytes + 32), transpose_bits(y));
}

TAILCUT_AVX2_INLINE __m256i eight(const std::uint8_t* bytes) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)));
}

// With a mask, because gcc 12 warns of what its gather without one leaves undefined.
TAILCUT_AVX2_INLINE __m256 gather_pieces(const double* pieces, __m128i index) {
    const __m256d all = _mm256_castsi256_pd(_mm256_set1_epi64x(-1));
    return _mm256_castpd_ps(_mm256_mask_i32gather_pd(_mm256_setzero_pd(), pieces, index, all, 8));
}

// Centroids::of for eight prefixes.
template <int bits>
TAILCUT_AVX2_INLINE __m256 means_of(__m256i prefix, const Centroids& means, __m256 few) {
    constexpr std::int32_t half = 1 << (bits - 1);
    const __m256i negative = _mm256_cmpgt_epi32(_mm256_set1_epi32(half), prefix);
    const __m256i m = _mm256_and_si256(_mm256_xor_si256(prefix, negative), _mm256_set1_epi32(half - 1));
    __m256 magnitude;
    if constexpr (bits <= 4) {
        magnitude = _mm256_permutevar8x32_ps(few, m);
    } else if constexpr (bits <= kTableBits) {
        magnitude = _mm256_i32gather_ps(means.means.data() + half, m, 4);
    } else {
        constexpr int below = bits - kTableBits - 1;
        constexpr float step = 1.0f / (1 << below);
        const auto* pieces = reinterpret_cast<const double*>(means.pieces.data());  // both floats at once
        const __m256i piece = _mm256_srli_epi32(m, below);
        const __m256 a = gather_pieces(pieces, _mm256_castsi256_si128(piece));
        const __m256 b = gather_pieces(pieces, _mm256_extracti128_si256(piece, 1));
        const __m256 c = _mm256_permute2f128_ps(a, b, 0x20), d = _mm256_permute2f128_ps(a, b, 0x31);
        const __m256 begin = _mm256_shuffle_ps(c, d, 0x88), width = _mm256_shuffle_ps(c, d, 0xDD);
        // c holds pieces 0 1 | 4 5 and d 2 3 | 6 7, so both are in order.
        const __m256 low = _mm256_cvtepi32_ps(_mm256_and_si256(m, _mm256_set1_epi32((1 << below) - 1)));
        const __m256 at =
            _mm256_add_ps(_mm256_mul_ps(low, _mm256_set1_ps(step)), _mm256_set1_ps(0.5f * step));
        magnitude = _mm256_add_ps(begin, _mm256_mul_ps(width, at));
    }
    const __m256 sign = _mm256_and_ps(_mm256_castsi256_ps(negative), _mm256_set1_ps(-0.0f));
    return _mm256_xor_ps(magnitude, sign);
}

template <int bits, bool add>
TAILCUT_AVX2 void decode_granules(const DecodeRun& run, const Centroids& means) {
    const __m256 sigma = _mm256_set1_ps(run.sigma);
    alignas(32) float small[8] = {};
    if constexpr (bits <= 4)
        for (std::size_t m = 0; m < (1u << (bits - 1)); ++m) small[m] = means.means[(1u << (bits - 1)) + m];
    const __m256 few = _mm256_load_ps(small);
    for (std::size_t g = run.first; g < run.last; ++g) {
        alignas(32) std::uint8_t upper[64], lower[64];
        bytes_of<(bits < 8 ? bits : 8)>(run, 0, g, upper);
        if constexpr (bits > 8) bytes_of<bits - 8>(run, 8, g, lower);
        float* out = run.out + 64 * g;
#pragma GCC unroll 8
        for (std::size_t r = 0; r < 8; ++r) {
            __m256i prefix = eight(upper + 8 * r);
            if constexpr (bits < 8) prefix = _mm256_srli_epi32(prefix, 8 - bits);
            if constexpr (bits > 8)
                prefix = _mm256_or_si256(_mm256_slli_epi32(prefix, bits - 8),
                                         _mm256_srli_epi32(eight(lower + 8 * r), 16 - bits));
            __m256 value = _mm256_mul_ps(means_of<bits>(prefix, means, few), sigma);
            if constexpr (add) value = _mm256_add_ps(_mm256_loadu_ps(out + 8 * r), value);
            _mm256_storeu_ps(out + 8 * r, value);
        }
    }
}

template <int bits>
void decode_bits(const DecodeRun& run, const Centroids& means) {
    if (run.bits != bits) {
        if constexpr (bits > 1) decode_bits<bits - 1>(run, means);
        return;
    }
    return run.add ? decode_granules<bits, true>(run, means) : decode_granules<bits, false>(run, means);
}

}  // namespace

void encode_avx2(const EncodeRun& run) {
    return run.planes > 8 ? encode_granules<true>(run) : encode_granules<false>(run);
}

void decode_avx2(const DecodeRun& run, const Centroids& means) { decode_bits<kMaxPlanes>(run, means); }

}  // namespace tailcut::codec

#endif
