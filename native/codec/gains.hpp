// How much of a block's vector its decoded prefixes hold, when that is not what N(0, 1) says.
//
// The centroids of a Gaussian block satisfy <z, Q_b z> = (1 - D_b)·|z|², and that constant makes decoding unbiased.
// Rotated blocks of few large coordinates are no Gaussian but a lattice (one spike: all |z| equal), and so are means
// of few coarse values: there the constant is off by up to 45 %. For those the sender measures
//     r_b = <z, Q_b z> / ((1 - D_b)·|z|²) - 1
// for b = 1..9; from 10 bits on r is below 0.002 whatever the block. r_1 and r at the sent b go into the header, the
// others (16 bytes at most) follow plane 1, where everybody has them who has more than that plane. It is measured on
// a sample of the block, whose noise adds D_b/300 to the error. A packet with r_1 = 0 was not measured.
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

// r_1 of a block that is Gaussian and yet sends gains: as good as 0, and not 0.
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

// Of a whole rotated block, for packets of at most `planes` planes.
Gains measure_gains(std::span<const float> z, const Scale& scale, std::uint64_t key, int planes);

// IEEE half precision, by integer arithmetic.
std::uint16_t to_half(float value);
float from_half(std::uint16_t half);
constexpr bool is_finite_half(std::uint16_t half) { return (half & 0x7C00) != 0x7C00; }

}  // namespace tailcut::codec
