// The scale of a block: σ, and what has to be known before its coordinates can be coded.
#pragma once

#include <cstdint>
#include <span>

namespace tailcut::codec {

struct Scale {
    float sigma = 0;          // on the wire; 0: the block is zero; NaN: it holds an Inf or a NaN
    float unit = 0;           // coordinate · unit = y/(1.6·√8), the argument of quantize()
    int exponent = 0;         // the coordinates have been multiplied by 2^exponent
    bool gaussian = false;    // enough coordinates share the norm: the nominal gains hold
    bool non_finite = false;  // rule 10

    // Its gains have to be measured.
    bool far_from_gaussian() const { return !gaussian && unit != 0; }
};

float sum_of_squares(std::span<const float> z);  // of a multiple of 16, the same bits everywhere

// Rotates a block and finds its scale. `out` may be `in`. A block that is too large or too small for sums of fourth
// powers in fp32 is brought to the middle of the range by a power of two first: coordinate · unit is right for what
// is in `out`, and sigma for the block as it was.
Scale rotate_and_scale(std::span<const float> in, std::span<float> out, std::uint64_t key);

// The scale of a mean in the rotated domain, over `present` coordinates; the others are zeros. It is taken for Gaussian
// if what it is the mean of is. Unless it is `even`, over the same ranks everywhere, some of its granules spread more
// than others, and the scale is so large that the code holds those too. As above, z may be brought to the middle of the
// range.
Scale scale_of_mean(std::span<float> z, std::size_t present, bool gaussian, bool even);

}  // namespace tailcut::codec
