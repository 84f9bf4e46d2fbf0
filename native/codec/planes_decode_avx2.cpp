// Decoding planes with AVX2: the words of the planes become codes by transposing small bit matrices.
#include "codec/planes_kernels.hpp"

#if defined(__x86_64__)

#include <immintrin.h>

#include <bit>

#define TAILCUT_AVX2 [[gnu::target("avx2,fma")]]
#define TAILCUT_AVX2_INLINE [[gnu::target("avx2,fma"), gnu::always_inline]] inline

namespace tailcut::codec {
namespace {

TAILCUT_AVX2_INLINE __m256i swap_bits(__m256i x, long long mask, int by) {
    const __m256i t =
        _mm256_and_si256(_mm256_xor_si256(x, _mm256_srli_epi64(x, by)), _mm256_set1_epi64x(mask));
    return _mm256_xor_si256(x, _mm256_xor_si256(t, _mm256_slli_epi64(t, by)));
}

// Each 64 bits are a matrix of 8 rows, one byte each.
TAILCUT_AVX2_INLINE __m256i transpose_bits(__m256i x) {
    x = swap_bits(x, 0x00AA00AA00AA00AA, 7);
    x = swap_bits(x, 0x0000CCCC0000CCCC, 14);
    return swap_bits(x, 0x00000000F0F0F0F0, 28);
}

// A plane's word of a granule; zero for planes from `end` on.
TAILCUT_AVX2_INLINE __m128i word_of(const DecodeRun& run, int plane, std::size_t g, int end) {
    if (plane >= end) return _mm_setzero_si128();
    return _mm_loadl_epi64(
        reinterpret_cast<const __m128i*>(run.from.word(static_cast<std::size_t>(plane), g)));
}

// Planes [plane, plane + count) of a granule as 64 bytes, with the first plane in the top bit.
template <int count>
TAILCUT_AVX2_INLINE void bytes_of(const DecodeRun& run, int plane, std::size_t g, std::uint8_t* bytes) {
    __m128i row[8];
#pragma GCC unroll 8
    for (int r = 0; r < 8; ++r) row[7 - r] = word_of(run, plane + r, g, plane + count);
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

// The masked gather is used because gcc 12 warns about a value that the unmasked one leaves undefined.
TAILCUT_AVX2_INLINE __m256 gather_pieces(const double* pieces, __m128i index) {
    const __m256d all = _mm256_castsi256_pd(_mm256_set1_epi64x(-1));
    return _mm256_castpd_ps(_mm256_mask_i32gather_pd(_mm256_setzero_pd(), pieces, index, all, 8));
}

// Centroids::of for eight prefixes.
template <int bits>
TAILCUT_AVX2_INLINE __m256 means_of(__m256i prefix, const Centroids& means) {
    constexpr std::int32_t half = 1 << (bits - 1);
    const __m256i negative = _mm256_cmpgt_epi32(_mm256_set1_epi32(half), prefix);
    const __m256i m = _mm256_and_si256(_mm256_xor_si256(prefix, negative), _mm256_set1_epi32(half - 1));
    __m256 magnitude;
    if constexpr (bits <= kTableBits) {
        magnitude = _mm256_i32gather_ps(means.means.data() + half, m, 4);
    } else {
        constexpr int below = bits - kTableBits - 1;
        constexpr float step = 1.0f / (1 << below);
        // Loads both floats of a piece at once.
        const auto* pieces = reinterpret_cast<const double*>(means.pieces.data());
        const __m256i piece = _mm256_srli_epi32(m, below);
        const __m256 a = gather_pieces(pieces, _mm256_castsi256_si128(piece));
        const __m256 b = gather_pieces(pieces, _mm256_extracti128_si256(piece, 1));
        const __m256 c = _mm256_permute2f128_ps(a, b, 0x20), d = _mm256_permute2f128_ps(a, b, 0x31);
        const __m256 begin = _mm256_shuffle_ps(c, d, 0x88), width = _mm256_shuffle_ps(c, d, 0xDD);
        // c holds pieces 0 1 | 4 5 and d holds 2 3 | 6 7, so both results are in order.
        const __m256 low = _mm256_cvtepi32_ps(_mm256_and_si256(m, _mm256_set1_epi32((1 << below) - 1)));
        const __m256 at =
            _mm256_add_ps(_mm256_mul_ps(low, _mm256_set1_ps(step)), _mm256_set1_ps(0.5f * step));
        magnitude = _mm256_add_ps(begin, _mm256_mul_ps(width, at));
    }
    const __m256 sign = _mm256_and_ps(_mm256_castsi256_ps(negative), _mm256_set1_ps(-0.0f));
    return _mm256_xor_ps(magnitude, sign);
}

template <bool add>
TAILCUT_AVX2_INLINE void put(float* out, __m256 values) {
    _mm256_storeu_ps(out, add ? _mm256_add_ps(_mm256_loadu_ps(out), values) : values);
}

// 16 floats, given by the lower and the upper halves of their bits.
template <bool add>
TAILCUT_AVX2_INLINE void put_halves(float* out, __m256i lower, __m256i upper) {
    put<add>(out, _mm256_castsi256_ps(_mm256_unpacklo_epi16(lower, upper)));
    put<add>(out + 8, _mm256_castsi256_ps(_mm256_unpackhi_epi16(lower, upper)));
}

// Up to four bits there are 16 means. A shuffle looks up one byte of them for 32 coordinates at once.
template <int bits, bool add>
TAILCUT_AVX2 void decode_short(const DecodeRun& run, const Centroids& means) {
    alignas(16) std::uint8_t bytes[4][16];  // of the means: by byte within the float, then by code
    for (std::uint32_t code = 0; code < 16; ++code) {
        const auto value = std::bit_cast<std::uint32_t>(means.of(code >> (4 - bits), bits) * run.sigma);
        for (std::size_t c = 0; c < 4; ++c) bytes[c][code] = static_cast<std::uint8_t>(value >> (8 * c));
    }
    __m256i column[4];
    for (std::size_t c = 0; c < 4; ++c)
        column[c] = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes[c])));
    const __m256i nibble = _mm256_set1_epi8(15);
    for (std::size_t g = run.first; g < run.last; ++g) {
        // Four bytes, one from each of planes 4 to 1, are two 4x4 bit matrices: one of coordinates 0 to 3 of
        // eight, one of 4 to 7.
        const __m128i ab = _mm_unpacklo_epi8(word_of(run, 3, g, bits), word_of(run, 2, g, bits));
        const __m128i cd = _mm_unpacklo_epi8(word_of(run, 1, g, bits), word_of(run, 0, g, bits));
        __m256i x = _mm256_set_m128i(_mm_unpackhi_epi16(ab, cd), _mm_unpacklo_epi16(ab, cd));
        x = swap_bits(x, 0x00AA00AA00AA00AA, 7);
        x = swap_bits(x, 0x0000CCCC0000CCCC, 14);
        // The former go to the lower lanes and the latter to the upper lanes, so that unpacking leaves them
        // in order.
        const __m256i former = _mm256_and_si256(x, nibble);
        const __m256i latter = _mm256_and_si256(_mm256_srli_epi16(x, 4), nibble);
        const __m256i codes[2] = {_mm256_permute2x128_si256(former, latter, 0x20),
                                  _mm256_permute2x128_si256(former, latter, 0x31)};
#pragma GCC unroll 2
        for (std::size_t half = 0; half < 2; ++half) {
            __m256i byte[4];
#pragma GCC unroll 4
            for (std::size_t c = 0; c < 4; ++c) byte[c] = _mm256_shuffle_epi8(column[c], codes[half]);
            float* out = run.out + 64 * g + 32 * half;
            put_halves<add>(out, _mm256_unpacklo_epi8(byte[0], byte[1]),
                            _mm256_unpacklo_epi8(byte[2], byte[3]));
            put_halves<add>(out + 16, _mm256_unpackhi_epi8(byte[0], byte[1]),
                            _mm256_unpackhi_epi8(byte[2], byte[3]));
        }
    }
}

template <int bits, bool add>
TAILCUT_AVX2 void decode_granules(const DecodeRun& run, const Centroids& means) {
    const __m256 sigma = _mm256_set1_ps(run.sigma);
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
            put<add>(out + 8 * r, _mm256_mul_ps(means_of<bits>(prefix, means), sigma));
        }
    }
}

template <int bits>
void decode_bits(const DecodeRun& run, const Centroids& means) {
    if (run.bits != bits) {
        if constexpr (bits > 1) decode_bits<bits - 1>(run, means);
        return;
    }
    if constexpr (bits <= 4)
        return run.add ? decode_short<bits, true>(run, means) : decode_short<bits, false>(run, means);
    else
        return run.add ? decode_granules<bits, true>(run, means) : decode_granules<bits, false>(run, means);
}

}  // namespace

void decode_vector(const DecodeRun& run, const Centroids& means) { decode_bits<kMaxPlanes>(run, means); }

}  // namespace tailcut::codec

#endif
