// How much of a block's vector its decoded prefixes hold, for blocks where N(0, 1) does not predict it.
//
// The centroids of a Gaussian block satisfy <z, Q_b z> = (1 - D_b)·|z|², and that constant makes decoding
// unbiased. A rotated block with few large coordinates is not Gaussian but a lattice (with one spike, all |z|
// are equal), and so is a mean of few coarse values. There the constant is off by up to 45 %. For such blocks
// the sender measures r_b = <z, Q_b z> / ((1 - D_b)·|z|²) - 1 for b = 1..9; from 10 bits on, r is below 0.002
// for every block. r_1 and r at the sent b go into the header. The others, at most 16 bytes, follow plane 1,
// so that whoever has more than plane 1 has them. r is measured on a sample of the block, whose noise adds
// D_b/300 to the error. A packet with r_1 = 0 was not measured.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "codec/centroids.hpp"
#include "codec/scale.hpp"
#include "wire/header.hpp"

namespace tailcut::codec {

inline constexpr int kMeasuredBits = wire::kMeasuredPlanes;

// r_1 of a block that is Gaussian but still sends gains: practically 0, yet distinct from 0.
inline constexpr std::uint16_t kNominalGain = 1;

struct Gains {
    std::array<std::uint16_t, kMeasuredBits + 1> deviation{};  // r_b by b, fp16
    std::array<float, kMeasuredBits + 1> noise{};              // by b: |z - Q_b z/w_b|²/|z|², not sent

    bool measured() const { return deviation[1] != 0; }
    std::uint16_t at(int bits) const {
        return bits <= kMeasuredBits ? deviation[static_cast<std::size_t>(bits)] : 0;
    }
    // The error of unbiased decoding, as a share of the block's energy.
    double noise_at(int bits) const {
        if (deviation[1] <= kNominalGain || bits > kMeasuredBits) return nominal_noise(bits);
        return noise[static_cast<std::size_t>(bits)];
    }
};

// Measures a whole rotated block, for packets of at most `planes` planes.
Gains measure_gains(std::span<const float> z, const Scale& scale, std::uint64_t key, int planes);

// IEEE half precision, by integer arithmetic.
std::uint16_t to_half(float value);
float from_half(std::uint16_t half);
constexpr bool is_finite_half(std::uint16_t half) { return (half & 0x7C00) != 0x7C00; }

}  // namespace tailcut::codec
