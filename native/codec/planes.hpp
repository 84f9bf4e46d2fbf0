// The embedded code: bit planes in which every byte prefix of a packet is a coarser packet.
//
// A packet is a run of whole granules of one rotated block. Its payload is plane 1, [gains,] plane 2, ...,
// plane b. A plane has one bit of each coordinate, which makes 8 bytes per granule. A prefix of the payload
// gives its first granules one bit more than the others. A granule whose word of a plane is cut off does
// without that plane; without its word of plane 1 it is absent.
//
// Why ops are unbiased: write w_b = (1 - D_b)(1 + r_b) for the weight of b bits (r_b: see gains.hpp; it is
// mostly 0) and C for the decoded c_b(q)·σ of one rank's granule. Over the random rotation E[C] = w_b·z. So
// the owner's mean m = Σ C_i / Σ w_i (accumulate(), then one division per granule) has the expectation of the
// mean over the ranks that delivered, whatever their bits; with 16 bits w = 1 up to 1e-9. The owner encodes m
// once. A receiver decodes it to C' with <C', m> = w'·|m|² and divides by w' (S below), so the remaining
// error is orthogonal to m. It is also orthogonal to the true mean if that is linear in m given the cells.
// This holds for independent vectors of equal widths, where the mean is Σ C_i / N. Otherwise a mean that is
// sent coarsely, under the rotation in which it was received, is biased: measured 5 % at one plane for
// correlated vectors, below 1 % at two and four, 3.5 % in one case of mixed widths. An owner that rotates its
// mean back and sends it under a key of its own has no such bias (docs/codec.md).
//
// Why replicas are equal: the owner discards m and decodes its own packets as the receivers do. All do the
// same arithmetic, and the kernels are equal bit for bit, so replicas that got all bytes are equal too.
//
// A block is unbiased by one scalar S = coordinates / Σ w rather than by dividing each coordinate. Where bits
// differ this gives the smaller error, 1/mean(w) - 1 instead of mean(1/w) - 1, and absent granules (w = 0)
// need no rule of their own. unrotate() applies S at no cost. `biased` decoding uses S = 1: the centroids,
// which have the least squared error.
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
// The inverse, for a packet that begins at granule `first` of a shard.
void put_run(const PlanesHead& head, std::uint32_t first, std::uint32_t shard_len, wire::Header& header);
// Whether the packet's block needed measured gains. (gain_one == kNominalGain: it did not, but sends gains
// because its neighbours do.)
inline bool far_from_gaussian(const PlanesHead& head) { return head.gain_one > kNominalGain; }
PlanesHead head_of(std::uint32_t granules, int planes, const Scale& scale, const Gains& gains);

// `z` holds the run's coordinates, a multiple of 64, which begin at granule `first_granule` of the block.
// Writes payload_bytes().
void encode(std::span<const float> z, const PlanesHead& head, const Scale& scale, const Gains& gains,
            std::uint64_t key, std::uint32_t first_granule, std::span<std::byte> payload);

// What arrived: the first `longer` granules have bits + 1 bits, the others have `bits`, which may be 0.
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
// Accepts any payload of any length: surplus bytes are ignored, and hostile gains are kept within bounds.
Cut cut_of(const PlanesHead& head, std::span<const std::byte> payload);

// w_b for all the planes that the header states.
float stated_weight(const PlanesHead& head);

// out = c_b(q)·σ, and 0 where nothing came.
Cut decode(const PlanesHead& head, std::span<const std::byte> payload, std::span<float> out);
// sums += count·c_b(q)·σ and weights[granule] += count·w_b, for a vector that stands for `count` vectors.
Cut accumulate(const PlanesHead& head, std::span<const std::byte> payload, std::span<float> sums,
               std::span<float> weights, float count = 1);

// Makes a packet of its own from `granules` granules of a packet, beginning with its granule `first`, and
// from its first `planes` planes, which must have come.
PlanesHead slice(const PlanesHead& head, std::span<const std::byte> payload, std::uint32_t first,
                 std::uint32_t granules, int planes, std::byte* out);

}  // namespace tailcut::codec
