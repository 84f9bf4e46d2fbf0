#include "codec/block_sum.hpp"

#include <algorithm>

#include "codec/rotate.hpp"

namespace tailcut::codec {

void BlockSum::add(const PlanesHead& head, std::span<const std::byte> payload, std::span<float> place) {
    if (shift_ == 0) shift_ = head.sigma > 0x1p60f ? 0x1p-64f : head.sigma < 0x1p-60f ? 0x1p64f : 1.0f;
    PlanesHead shifted = head;
    shifted.sigma *= shift_;
    weight_ += decode(shifted, payload, place).total_weight(head.granules);
}

void BlockSum::rotate_back(std::span<float> z, std::span<float> out, std::uint64_t key, double factor) const {
    const auto scale = static_cast<float>(shift_ == 0 ? factor : factor / double{shift_});
    if (out.size() == z.size()) return unrotate(z, out, key, scale);
    unrotate(z, z, key, scale);
    std::copy_n(z.begin(), out.size(), out.begin());
}

void BlockSum::rotate_back_bounded(std::span<float> z, std::span<float> out, std::uint64_t key) const {
    constexpr double kMostUnbiasing = 4;
    if (weight_ > 0)
        rotate_back(z, out, key, std::min(unbiasing(z.size()), kMostUnbiasing));
    else
        std::fill(out.begin(), out.end(), 0.0f);
}

}  // namespace tailcut::codec
