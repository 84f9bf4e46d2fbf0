// The scale of a block: σ, and whatever else coding its coordinates requires.
#pragma once

#include <cstdint>
#include <span>

namespace tailcut::codec {

struct Scale {
    float sigma = 0;          // as sent; 0: the block is zero; NaN: it holds an Inf or a NaN
    float unit = 0;           // coordinate · unit = y/(1.6·√8), the argument of quantize()
    int exponent = 0;         // the coordinates have been multiplied by 2^exponent
    bool gaussian = false;    // enough coordinates share the norm for the nominal gains to hold
    bool non_finite = false;  // rule 10

    // Whether its gains have to be measured.
    bool far_from_gaussian() const { return !gaussian && unit != 0; }
};

// The size must be a multiple of 16. The result has the same bits on every machine.
float sum_of_squares(std::span<const float> z);

// Rotates a block and finds its scale. `out` may be `in`. A block whose values are too large or too small for
// fp32 sums of fourth powers is first multiplied by a power of two. Then `unit` fits the coordinates in
// `out`, and sigma fits the original block.
Scale rotate_and_scale(std::span<const float> in, std::span<float> out, std::uint64_t key);

// The scale of a mean in the rotated domain. `present` coordinates have a value, the others are zeros. The
// mean counts as Gaussian if the contributions to it do. `even` says that the same ranks contributed
// everywhere. Otherwise some granules spread more than others, and the scale is made large enough for the
// code to hold those too. As above, z may be multiplied by a power of two.
Scale scale_of_mean(std::span<float> z, std::size_t present, bool gaussian, bool even);

}  // namespace tailcut::codec
