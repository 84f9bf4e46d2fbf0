// One block, put together from the packets that came of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "codec/planes.hpp"

namespace tailcut::codec {

class BlockSum {
public:
    // Decodes a packet to its place in the rotated block. Packets of one block do not overlap.
    void add(const PlanesHead& head, std::span<const std::byte> payload, std::span<float> place);

    // Σ w over the block's coordinates. The same in any order of adding: the sums are exact, as weights are fp32 within
    // a few powers of two of 1 and a block has at most 2^15 coordinates.
    double weight() const { return weight_; }
    // What makes the block unbiased; 0 if nothing came.
    double unbiasing(std::size_t block_len) const {
        return weight_ > 0 ? static_cast<double>(block_len) / weight_ : 0;
    }

    // The block's energy, as σ and what came of it tell, and the errors of rotate_back_bounded() by what was cut off and by
    // what did not come, beside that by the planes that were sent.
    struct Damage {
        double energy = 0, trimmed = 0, lost = 0;
    };
    Damage damage(std::size_t block_len) const;

    // Rotates back, times `factor`. `z` holds zeros where nothing was added, and is lost; it may be `out`, which may be
    // shorter by what a shard's last block is longer than the shard.
    void rotate_back(std::span<float> z, std::span<float> out, std::uint64_t key, double factor) const;
    // The same with the factor of an op: unbiased, but a block of which less than a quarter came is shrunk instead of
    // blown up, whose error would exceed three times its norm; and zero if nothing came.
    void rotate_back_bounded(std::span<float> z, std::span<float> out, std::uint64_t key) const;

private:
    double weight_ = 0;
    double stated_weight_ = 0, energy_ = 0;  // of whole packets: Σ w, Σ σ²
    std::size_t coords_ = 0;                 // of which something came
    float shift_ =
        0;  // a power of two that keeps sums of the coordinates within the normal range; 0: nothing came
};

}  // namespace tailcut::codec
