// The randomized Walsh-Hadamard rotation of one block: z = H·D·x/√d, with D the diagonal of random signs.
//
// Coordinate k's sign is bit k mod 64 of mix(key + k/64), set for minus. The butterflies run over strides
// 1, 2, 4, ... and every output is one tree of sums and differences; the sums of powers have 16 lanes. So the
// scalar twin and AVX2 give the same bits, and so does every machine.
#pragma once

#include <cstdint>
#include <span>

namespace tailcut::codec {

inline constexpr std::size_t kMaxRotation = std::size_t{1} << 16;

// Of the input, which are those of the result too for the squares: the rotation keeps the norm.
struct PowerSums {
    float squares = 0;
    float fourths = 0;
};

// The block's length is a power of two from 64 to kMaxRotation. `out` may be `in`.
PowerSums rotate(std::span<const float> in, std::span<float> out, std::uint64_t key);

// out = scale · D·H·z/√d: with scale 1 the inverse. `work` holds z and is lost; it may be `out`.
void unrotate(std::span<float> work, std::span<float> out, std::uint64_t key, float scale);

}  // namespace tailcut::codec
