// The randomized Walsh-Hadamard rotation of one block: z = H·D·x/√d, where D is the diagonal matrix of random
// signs.
//
// The sign of coordinate k is bit k mod 64 of mix(key + k/64); a set bit means minus. The butterflies run
// over strides 1, 2, 4, ..., so every output is one fixed tree of sums and differences. The sums of powers
// have 16 lanes. So the scalar twin, AVX2 and NEON give the same bits, on every machine.
#pragma once

#include <cstdint>
#include <span>

namespace tailcut::codec {

inline constexpr std::size_t kMaxRotation = std::size_t{1} << 16;

// Power sums of the input. The sum of squares is also that of the result, because the rotation keeps the
// norm.
struct PowerSums {
    float squares = 0;
    float fourths = 0;
};

// The block's length is a power of two from 64 to kMaxRotation. `out` may be `in`.
PowerSums rotate(std::span<const float> in, std::span<float> out, std::uint64_t key);

// out = scale · D·H·z/√d; with scale 1 this is the inverse. `work` holds z and its contents are lost; it may
// be `out`.
void unrotate(std::span<float> work, std::span<float> out, std::uint64_t key, float scale);

}  // namespace tailcut::codec
