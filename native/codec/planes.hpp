// The embedded code: bit planes of which every byte prefix is a coarser packet.
//
// A packet is a run of whole granules of one rotated block. Payload: plane 1, [gains,] plane 2, ..., plane b; a plane
// has one bit of each coordinate, 8 bytes a granule. A prefix of the payload gives its first granules one bit more
// than the others; a granule whose word of a plane is cut does without that plane. In plane 1: it is absent.
//
// What makes an op unbiased and its replicas equal. Write w_b = (1 - D_b)(1 + r_b) for the weight of b bits (r_b:
// gains.hpp, 0 for most), C for the decoded c_b(q)·σ of one rank's granule. Over the random rotation E[C] = w_b·z, so
// the owner's mean m = Σ C_i / Σ w_i (accumulate(), then a division for each granule) has the expectation of the mean
// of those who delivered, whatever their bits; with 16 bits w = 1 up to 1e-9. The owner encodes m once. A receiver
// decodes it to C' with <C', m> = w'·|m|², and divides by w' (S below): the error that is left is orthogonal to m.
// It is so to the true mean too if that is linear in m given the cells, as for independent vectors of equal widths,
// where it is Σ C_i / N. Otherwise a mean that is sent coarsely, under the rotation that it was received in, is biased:
// measured 5 % at one plane for correlated vectors, below 1 % at two and four, 3.5 % in one case of mixed widths. An
// owner that rotates its mean back and sends it under a key of its own has no such bias (docs/codec.md).
// Bits: the owner throws m away and decodes its own packets as the receivers do; both do the same arithmetic, kernels
// are equal bit for bit, and so replicas are, when all of them got all bytes.
//
// One scalar S = coordinates / Σ w unbiases a block, not a division of every coordinate: where bits differ this is the
// smaller error, 1/mean(w) - 1 against mean(1/w) - 1, and absent granules (w = 0) need no rule of their own.
// unrotate() takes S at no cost. `biased` decoding is S = 1: centroids, the least squared error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/types.hpp"
#include "codec/gains.hpp"
#include "codec/scale.hpp"

namespace tailcut::codec {

// What a header says about its payload.
struct PlanesHead {
    std::uint32_t granules = 0;
    int planes = 0;  // 1 to 16
    float sigma = 0;
    std::uint16_t gain_one = 0, gain_full = 0;

    std::size_t stride() const { return std::size_t{granules} * 8; }
    std::size_t gain_bytes() const { return wire::gain_table_bytes(planes, gain_one != 0); }
    std::size_t payload_bytes() const { return stride() * static_cast<std::size_t>(planes) + gain_bytes(); }
};
PlanesHead head_of(const wire::Header& header);
// Its inverse, for a packet of a shard from granule `first` on.
void put_run(const PlanesHead& head, std::uint32_t first, std::uint32_t shard_len, wire::Header& header);
// Whether the packet's block was measured because it had to be. (1: it was not, but sends gains as its neighbours do.)
inline bool far_from_gaussian(const PlanesHead& head) { return head.gain_one > kNominalGain; }
PlanesHead head_of(std::uint32_t granules, int planes, const Scale& scale, const Gains& gains);

// `z`: the run's coordinates, a multiple of 64, granule `first_granule` of the block and on. Writes payload_bytes().
void encode(std::span<const float> z, const PlanesHead& head, const Scale& scale, const Gains& gains,
            std::uint64_t key, std::uint32_t first_granule, std::span<std::byte> payload);

// What arrived: `longer` granules with bits + 1 bits, then the others with `bits`, which may be 0.
struct Cut {
    std::uint32_t longer = 0;
    int bits = 0;
    float longer_weight = 0, weight = 0;

    int bits_of(std::uint32_t granule) const { return bits + (granule < longer ? 1 : 0); }
    float weight_of(std::uint32_t granule) const { return granule < longer ? longer_weight : weight; }
    // Σ w over the packet's coordinates.
    double total_weight(std::uint32_t granules) const {
        return kGranule * (double{longer_weight} * longer + double{weight} * (granules - longer));
    }
};
// Any payload, of any length: what is too much is not looked at, and hostile gains stay within bounds.
Cut cut_of(const PlanesHead& head, std::span<const std::byte> payload);

// w_b of all the planes that the header states.
float stated_weight(const PlanesHead& head);

// out = c_b(q)·σ, and 0 where nothing came.
Cut decode(const PlanesHead& head, std::span<const std::byte> payload, std::span<float> out);
// sums += count·c_b(q)·σ and weights[granule] += count·w_b: a vector that stands for so many.
Cut accumulate(const PlanesHead& head, std::span<const std::byte> payload, std::span<float> sums,
               std::span<float> weights, float count = 1);

// `granules` of a packet, from its `first` on, with its first `planes` planes, which must have come: a packet of its own.
PlanesHead slice(const PlanesHead& head, std::span<const std::byte> payload, std::uint32_t first,
                 std::uint32_t granules, int planes, std::byte* out);

}  // namespace tailcut::codec
