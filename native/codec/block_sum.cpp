#include "codec/block_sum.hpp"

#include <algorithm>

#include "codec/rotate.hpp"

namespace tailcut::codec {
namespace {

constexpr double kMostUnbiasing = 4;

}  // namespace

void BlockSum::add(const PlanesHead& head, std::span<const std::byte> payload, std::span<float> place) {
    if (shift_ == 0) shift_ = head.sigma > 0x1p60f ? 0x1p-64f : head.sigma < 0x1p-60f ? 0x1p64f : 1.0f;
    PlanesHead shifted = head;
    shifted.sigma *= shift_;
    const Cut cut = decode(shifted, payload, place);
    weight_ += cut.total_weight(head.granules);
    const std::size_t came = kGranule * (cut.bits > 0 ? head.granules : cut.longer);
    coords_ += came;
    stated_weight_ += double{stated_weight(head)} * static_cast<double>(came);
    energy_ += double{head.sigma} * head.sigma * static_cast<double>(came);
}

// With C the decoded block, |C|² = <z, C> = w·|z|², and S the factor: |z - S·C|² = |z|²·(1 - 2·S·w + S²·w).
BlockSum::Damage BlockSum::damage(std::size_t block_len) const {
    if (coords_ == 0) return {};
    const auto all = static_cast<double>(block_len), came = static_cast<double>(coords_);
    Damage damage{energy_ / came * all, 0, 0};
    if (coords_ == block_len && weight_ == stated_weight_) return damage;
    const double stated = stated_weight_ / came, mean = weight_ / all;
    const double factor = std::min(unbiasing(block_len), kMostUnbiasing);
    const double error =
        damage.energy * std::max(0.0, 1 - 2 * factor * mean + factor * factor * mean - (1 / stated - 1));
    damage.lost = std::min(error, damage.energy * (all / came - 1) / stated);
    damage.trimmed = error - damage.lost;
    return damage;
}

void BlockSum::rotate_back(std::span<float> z, std::span<float> out, std::uint64_t key, double factor) const {
    const auto scale = static_cast<float>(shift_ == 0 ? factor : factor / double{shift_});
    if (out.size() == z.size()) return unrotate(z, out, key, scale);
    unrotate(z, z, key, scale);
    std::copy_n(z.begin(), out.size(), out.begin());
}

void BlockSum::rotate_back_bounded(std::span<float> z, std::span<float> out, std::uint64_t key) const {
    if (weight_ > 0)
        rotate_back(z, out, key, std::min(unbiasing(z.size()), kMostUnbiasing));
    else
        std::fill(out.begin(), out.end(), 0.0f);
}

}  // namespace tailcut::codec
