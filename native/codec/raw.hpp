// The raw codec: fp32 as it is. Pure functions on spans; the mean in rank order is the one arithmetic of a
// bucket, so the same contributions give the same bits on every machine.
#pragma once

#include <cstddef>
#include <span>

namespace tailcut::codec {

// out[k] = (((s0[k] + s1[k]) + s2[k]) + ...) / divisor, the sources given in rank order and at least one, the divisor
// above 0. `out` may be one of the sources. Returns whether any mean is Inf or NaN.
bool mean_in_order(std::span<const float* const> sources, float divisor, std::size_t count, float* out);

bool has_non_finite(std::span<const float> values);

}  // namespace tailcut::codec
