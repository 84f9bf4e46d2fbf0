// The raw codec: fp32 values as they are. The functions are pure and work on spans. A bucket's only
// arithmetic is the mean in rank order, so the same contributions give the same bits on every machine.
#pragma once

#include <cstddef>
#include <span>

namespace tailcut::codec {

// out[k] = (((s0[k] + s1[k]) + s2[k]) + ...) / divisor. There is at least one source, the sources are in rank
// order, and the divisor is above 0. `out` may be one of the sources. Returns whether any mean is Inf or NaN.
bool mean_in_order(std::span<const float* const> sources, float divisor, std::size_t count, float* out);

bool has_non_finite(std::span<const float> values);

}  // namespace tailcut::codec
