// Encoding and decoding planes with NEON. Eight coordinates and eight planes are a matrix of bits; both ways
// transpose it. From five bits on means are looked up one by one, because NEON has no gather.
#include "codec/planes_kernels.hpp"

#if defined(__aarch64__)

#include <arm_neon.h>

#include <bit>

#include "base/types.hpp"

namespace tailcut::codec {
namespace {

// A granule's byte of each coordinate, or its words of eight planes.
struct Bytes64 {
    uint8x16_t v[4];
};

template <int by>
inline uint8x16_t swap_bits(uint8x16_t bytes, std::uint64_t mask) {
    const uint64x2_t x = vreinterpretq_u64_u8(bytes);
    const uint64x2_t t = vandq_u64(veorq_u64(x, vshrq_n_u64(x, by)), vdupq_n_u64(mask));
    return vreinterpretq_u8_u64(veorq_u64(x, veorq_u64(t, vshlq_n_u64(t, by))));
}

// Each 64 bits are a matrix of 8 rows, one byte each.
inline void transpose_bits(Bytes64& bytes) {
    for (uint8x16_t& v : bytes.v) {
        v = swap_bits<7>(v, 0x00AA00AA00AA00AA);
        v = swap_bits<14>(v, 0x0000CCCC0000CCCC);
        v = swap_bits<28>(v, 0x00000000F0F0F0F0);
    }
}

// Byte 8r + c becomes byte 8c + r: words of planes become the rows of eight matrices, and the other way round.
inline Bytes64 transpose_bytes(const Bytes64& bytes) {
    const uint8x16x4_t table = {{bytes.v[0], bytes.v[1], bytes.v[2], bytes.v[3]}};
    const uint8x16_t first = {0, 8, 16, 24, 32, 40, 48, 56, 1, 9, 17, 25, 33, 41, 49, 57};
    Bytes64 out;
    for (std::size_t v = 0; v < 4; ++v)
        out.v[v] = vqtbl4q_u8(table, vaddq_u8(first, vdupq_n_u8(static_cast<std::uint8_t>(2 * v))));
    return out;
}

// Omits quantize()'s bounds because narrowing saturates: a block's |t| is below √d, far from the end of the
// integers.
inline int32x4_t codes4(float32x4_t t) {
    const float32x4_t one = vdupq_n_f32(1.0f);
    const float32x4_t s = vminq_f32(vfmaq_f32(vnegq_f32(one), t, t), one);
    float32x4_t p = vdupq_n_f32(kPhi[9]);
    for (int k = 8; k >= 0; --k) p = vfmaq_f32(vdupq_n_f32(kPhi[static_cast<std::size_t>(k)]), p, s);
    return vcvtq_s32_f32(vfmaq_f32(vdupq_n_f32(32768.0f), t, p));
}

inline uint16x8_t codes8(const float* z, float unit) {
    const int32x4_t a = codes4(vmulq_n_f32(vld1q_f32(z), unit));
    const int32x4_t b = codes4(vmulq_n_f32(vld1q_f32(z + 4), unit));
    return vcombine_u16(vqmovun_s32(a), vqmovun_s32(b));
}

// Zeros with a tie bit; see encode_scalar.
std::uint64_t tied_zeros(const EncodeRun& run, std::size_t g) {
    std::uint64_t zeros = 0;
    for (std::size_t k = 0; k < 64; ++k) zeros |= std::uint64_t{run.z[64 * g + k] == 0} << k;
    return zeros & mix(run.tie_key + g);
}

// Planes [first, last) of a granule, from a byte of each of its coordinates. Plane `first` is in the top bits.
inline void put_planes(const EncodeRun& run, std::size_t g, Bytes64 bytes, int first, int last,
                       std::uint64_t tied) {
    transpose_bits(bytes);
    bytes = transpose_bytes(bytes);
    for (int p = first; p < last; ++p) {
        const int row = 7 - (p - first);
        std::uint64_t words[2];
        vst1q_u64(words, vreinterpretq_u64_u8(bytes.v[row / 2]));
        const std::uint64_t word = words[row % 2] ^ tied;
        std::memcpy(run.to.word(static_cast<std::size_t>(p), g), &word, sizeof word);
    }
}

// Planes [first, last) as a byte of each coordinate; planes that are missing are zero bits.
inline Bytes64 bytes_of(const DecodeRun& run, std::size_t g, int first, int last) {
    std::uint64_t words[8] = {};
    for (int p = first; p < last; ++p)
        std::memcpy(&words[7 - (p - first)], run.from.word(static_cast<std::size_t>(p), g), sizeof words[0]);
    Bytes64 bytes;
    for (std::size_t v = 0; v < 4; ++v) bytes.v[v] = vreinterpretq_u8_u64(vld1q_u64(words + 2 * v));
    bytes = transpose_bytes(bytes);
    transpose_bits(bytes);
    return bytes;
}

// Up to four bits there are 16 means. A table lookup finds one byte of them for 16 coordinates at once.
void decode_short(const DecodeRun& run, const Centroids& means) {
    std::uint8_t columns[4][16];  // of the means: by byte within the float, then by code
    for (std::uint32_t code = 0; code < 16; ++code) {
        const float mean = means.of(code >> (4 - run.bits), run.bits);
        const auto value = std::bit_cast<std::uint32_t>(mean * run.sigma);
        for (std::size_t c = 0; c < 4; ++c) columns[c][code] = static_cast<std::uint8_t>(value >> (8 * c));
    }
    for (std::size_t g = run.first; g < run.last; ++g) {
        const Bytes64 bytes = bytes_of(run, g, 0, run.bits);
        for (std::size_t v = 0; v < 4; ++v) {
            const uint8x16_t code = vshrq_n_u8(bytes.v[v], 4);
            uint8x16x4_t floats;
            for (std::size_t c = 0; c < 4; ++c) floats.val[c] = vqtbl1q_u8(vld1q_u8(columns[c]), code);
            std::uint8_t interleaved[64];
            vst4q_u8(interleaved, floats);
            float* out = run.out + 64 * g + 16 * v;
            for (std::size_t k = 0; k < 16; k += 4) {
                const float32x4_t values = vreinterpretq_f32_u8(vld1q_u8(interleaved + 4 * k));
                vst1q_f32(out + k, run.add ? vaddq_f32(vld1q_f32(out + k), values) : values);
            }
        }
    }
}

template <int bits>
void decode_long(const DecodeRun& run, const Centroids& means) {
    for (std::size_t g = run.first; g < run.last; ++g) {
        const Bytes64 upper = bytes_of(run, g, 0, bits < 8 ? bits : 8);
        Bytes64 lower = {};
        if constexpr (bits > 8) lower = bytes_of(run, g, 8, bits);
        std::uint16_t codes[64];
        for (std::size_t v = 0; v < 4; ++v) {
            const uint8x16x2_t both = vzipq_u8(lower.v[v], upper.v[v]);
            vst1q_u16(codes + 16 * v, vreinterpretq_u16_u8(both.val[0]));
            vst1q_u16(codes + 16 * v + 8, vreinterpretq_u16_u8(both.val[1]));
        }
        float* out = run.out + 64 * g;
        for (std::size_t k = 0; k < 64; ++k) {
            const float value = means.of(codes[k] >> (kMaxPlanes - bits), bits) * run.sigma;
            out[k] = run.add ? out[k] + value : value;
        }
    }
}

template <int bits>
void decode_bits(const DecodeRun& run, const Centroids& means) {
    if (run.bits == bits) return decode_long<bits>(run, means);
    if constexpr (bits > 5) decode_bits<bits - 1>(run, means);
}

}  // namespace

void quantize8_vector(const float* z, float unit, std::uint32_t* codes) {
    const uint16x8_t q = codes8(z, unit);
    vst1q_u32(codes, vmovl_u16(vget_low_u16(q)));
    vst1q_u32(codes + 4, vmovl_u16(vget_high_u16(q)));
}

void encode_vector(const EncodeRun& run) {
    for (std::size_t g = 0; g < run.granules; ++g) {
        Bytes64 upper, lower;
        uint16x8_t middle = vdupq_n_u16(0);  // whether a code may be that of a zero
        for (std::size_t v = 0; v < 4; ++v) {
            const float* z = run.z + 64 * g + 16 * v;
            const uint16x8_t a = codes8(z, run.unit), b = codes8(z + 8, run.unit);
            upper.v[v] = vcombine_u8(vshrn_n_u16(a, 8), vshrn_n_u16(b, 8));
            lower.v[v] = vcombine_u8(vmovn_u16(a), vmovn_u16(b));
            const uint16x8_t zero = vdupq_n_u16(32768);
            middle = vorrq_u16(middle, vorrq_u16(vceqq_u16(a, zero), vceqq_u16(b, zero)));
        }
        const std::uint64_t tied = vmaxvq_u16(middle) ? tied_zeros(run, g) : 0;
        put_planes(run, g, upper, 0, run.planes < 8 ? run.planes : 8, tied);
        if (run.planes > 8) put_planes(run, g, lower, 8, run.planes, tied);
    }
}

void decode_vector(const DecodeRun& run, const Centroids& means) {
    if (run.bits <= 4) return decode_short(run, means);
    decode_bits<kMaxPlanes>(run, means);
}

}  // namespace tailcut::codec

#endif
