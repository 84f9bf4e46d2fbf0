// The meaning of a prefix of a coordinate's code: the conditional mean of its cell under N(0, 1), and the
// distortion of that mean.
//
// A coordinate's code is q = floor(65536·Φ(y/1.6)); its first b bits name one of 2^b nested cells. Cells lie
// symmetrically about zero, so tables cover magnitudes only. Up to 11 bits a table has an entry for every
// cell. From 12 bits on a cell is so small that its mean is its middle, which lies on the chord of one of
// 2048 pieces. The tables take 24 KB in all and stay in L1; a table of 2^16 means would not.
#pragma once

#include <array>
#include <cstdint>

namespace tailcut::codec {

inline constexpr int kMaxPlanes = 16;
inline constexpr int kTableBits = 11;
inline constexpr double kSpread = 1.6;
// y per unit of the code's argument: 1.6·√8.
inline constexpr double kCodeUnit = kSpread * 2.8284271247461903;

// D_b: the mean squared error of b bits on N(0, 1), which is 1 for no bits. See docs/codec.md, table 1; the
// tests recompute it.
inline constexpr std::array<double, kMaxPlanes + 1> kDistortion = {1.0,
                                                                   0.36338022763,
                                                                   0.11943084604,
                                                                   0.034847969507,
                                                                   0.0095478777747,
                                                                   0.0025256434165,
                                                                   6.5436443935e-4,
                                                                   1.6739107243e-4,
                                                                   4.2477537847e-5,
                                                                   1.0723902331e-5,
                                                                   2.6983464881e-6,
                                                                   6.7747760846e-7,
                                                                   1.699e-7,
                                                                   4.26e-8,
                                                                   1.07e-8,
                                                                   2.7e-9,
                                                                   7e-10};

// The error of unbiased decoding, as a share of a Gaussian block's energy.
constexpr double nominal_noise(int bits) { return 1 / (1 - kDistortion[static_cast<std::size_t>(bits)]) - 1; }

struct Centroids {
    // The mean of the m-th cell from zero outwards at b <= 11 bits is means[2^(b-1) + m].
    std::array<float, 1u << kTableBits> means;
    // A piece: where it begins, and its width.
    struct Piece {
        float begin, width;
    };
    std::array<Piece, 1u << kTableBits> pieces;

    // The mean of the cell that the first `bits` bits of a code name. The vector kernels do exactly this
    // arithmetic.
    float of(std::uint32_t prefix, int bits) const {
        const std::uint32_t half = 1u << (bits - 1);
        const bool negative = prefix < half;
        const std::uint32_t m = (negative ? ~prefix : prefix) & (half - 1);
        float magnitude;
        if (bits <= kTableBits) {
            magnitude = means[half + m];
        } else {
            const int below = bits - kTableBits - 1;
            const auto [begin, width] = pieces[m >> below];
            const auto low = static_cast<float>(m & ((1u << below) - 1));
            const float step = 1.0f / static_cast<float>(1u << below);
            magnitude = begin + width * (low * step + 0.5f * step);
        }
        return negative ? -magnitude : magnitude;
    }
};

// Built once, on first use, from sums, products and quotients of doubles only. No library function is called,
// so that every machine gets the same bits.
const Centroids& centroids();

}  // namespace tailcut::codec
