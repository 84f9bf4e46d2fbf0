// Assembles one block from those of its packets that came.
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

    // Σ w over the block's coordinates. The order of adding does not matter because the sums are exact:
    // weights are fp32 within a few powers of two of 1, and a block has at most 2^15 coordinates.
    double weight() const { return weight_; }
    // The factor that makes the block unbiased; 0 if nothing came.
    double unbiasing(std::size_t block_len) const {
        return weight_ > 0 ? static_cast<double>(block_len) / weight_ : 0;
    }

    // The same if what did not come is not to be made up for.
    double unbiasing() const { return weight_ > 0 ? static_cast<double>(coords_) / weight_ : 0; }
    // Decoded values were multiplied by this power of two; 0: nothing came.
    float shift() const { return shift_; }

    // The block's energy, estimated from the σ of the packets that came, and the error of
    // rotate_back_bounded() caused by trimming and by loss. The error caused by the number of planes sent is
    // not included.
    struct Damage {
        double energy = 0, trimmed = 0, lost = 0;
    };
    Damage damage(std::size_t block_len) const;

    // Rotates back and multiplies by `factor`. `z` holds zeros where nothing was added, and its contents are
    // lost; it may be `out`. `out` is shorter than `z` when the shard ends within its last block.
    void rotate_back(std::span<float> z, std::span<float> out, std::uint64_t key, double factor) const;
    // The same with the factor that ops use. It is the unbiased one, except that it is at most 4: when less
    // than a quarter of a block came, the unbiased factor would make the error exceed three times the block's
    // norm. The result is zero if nothing came.
    void rotate_back_bounded(std::span<float> z, std::span<float> out, std::uint64_t key) const;

private:
    double weight_ = 0;
    double stated_weight_ = 0, energy_ = 0;  // over whole packets: Σ w and Σ σ²
    std::size_t coords_ = 0;                 // coordinates of granules that delivered something
    // A power of two that keeps sums of the coordinates within the normal range; 0: nothing came.
    float shift_ = 0;
};

}  // namespace tailcut::codec
