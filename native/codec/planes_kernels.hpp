// The kernels behind planes.hpp, which work on whole granules, and the arithmetic of the code that they
// share.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "codec/centroids.hpp"
#include "codec/dispatch.hpp"

namespace tailcut::codec {

// 65536·Φ(√8·t) = 32768 + t·P(t² - 1) for t² <= 2, accurate to 0.045 of a 16-bit cell: a least-squares fit on
// Chebyshev points, reweighted until the errors were even. Beyond that range P keeps its last value, and the
// code saturates at 0 or 65535.
inline constexpr std::array<float, 10> kPhi = {32614.7589f, -15629.9532f, 10365.9154f, -6836.81936f,
                                               4194.23357f, -2304.28888f, 1094.47294f, -525.257682f,
                                               289.49318f,  -93.5793396f};

// The code of one coordinate; `t` is y/(1.6·√8). Zero is the lower end of the upper half.
//
// All kernels use fused multiply-adds: they halve the operations and round in the same places. On processors
// without them the library computes the same bits, slowly.
inline std::uint32_t quantize(float t) {
    float s = std::fma(t, t, -1.0f);
    s = s < 1.0f ? s : 1.0f;
    float p = kPhi[9];
    for (int k = 8; k >= 0; --k) p = std::fma(p, s, kPhi[static_cast<std::size_t>(k)]);
    const float q = std::fma(t, p, 32768.0f);
    return q < 0.0f ? 0 : q < 65535.0f ? static_cast<std::uint32_t>(q) : 65535;
}

// The codes of eight neighbours.
void quantize8(const float* z, float unit, std::uint32_t* codes);

// Where the planes are: the first one, and the second one with the others a stride apart. A plane has a word
// of 8 bytes for each granule; bit k of the word belongs to coordinate k.
template <typename Byte>
struct PlaneBytes {
    Byte* first;
    Byte* second;
    std::size_t stride;

    Byte* word(std::size_t plane, std::size_t granule) const {
        return (plane == 0 ? first : second + (plane - 1) * stride) + 8 * granule;
    }
};

// A coordinate times `unit` is the t of quantize(). The tie bits of granule g are mix(tie_key + g).
struct EncodeRun {
    const float* z;
    std::size_t granules;
    float unit;
    int planes;
    std::uint64_t tie_key;
    PlaneBytes<std::byte> to;
};

// Granules [first, last) of a packet, which have `bits` bits each. `out` points to granule 0.
struct DecodeRun {
    PlaneBytes<const std::byte> from;
    std::size_t first, last;
    int bits;
    float sigma;
    float* out;
    bool add;
};

void encode_scalar(const EncodeRun& run);
void decode_scalar(const DecodeRun& run, const Centroids& means);
#if defined(TAILCUT_VECTOR_KERNELS)
void quantize8_vector(const float* z, float unit, std::uint32_t* codes);
void encode_vector(const EncodeRun& run);
void decode_vector(const DecodeRun& run, const Centroids& means);
#endif

}  // namespace tailcut::codec
