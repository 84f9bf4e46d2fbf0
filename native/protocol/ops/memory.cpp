#include "protocol/ops/memory.hpp"

#include <algorithm>

namespace tailcut {
namespace {

// Rounds up to cache lines, and to at least one: an empty bucket has a block like any other.
std::size_t rounded(std::size_t floats) { return std::max<std::size_t>(16, (floats + 15) / 16 * 16); }

}  // namespace

Block::~Block() {
    if (home_) home_->release(*this);
}

void Block::leave_pool() {
    if (!pooled_) return;
    home_->pool_used_ -= floats_;
    pooled_ = false;
}

bool Block::join_pool() {
    if (pooled_ || !home_) return true;
    if (home_->pool_used_ + floats_ > home_->pool_) return false;
    home_->pool_used_ += floats_;
    pooled_ = true;
    return true;
}

Block Memory::take_pool(std::size_t floats) {
    return pool_used_ + rounded(floats) <= pool_ ? allocate(rounded(floats), true) : Block{};
}

Block Memory::take(std::size_t floats) { return allocate(rounded(floats), false); }

// Reuses a kept block of exactly this size if there is one: the buckets of a model recur in the same few
// sizes.
Block Memory::allocate(std::size_t floats, bool pooled) {
    const auto fitting =
        std::find_if(kept_.begin(), kept_.end(), [&](const auto& k) { return k.first == floats; });
    std::pair<std::size_t, Array> taken;
    if (fitting != kept_.end()) {
        taken = std::move(*fitting);
        kept_.erase(fitting);
        kept_floats_ -= taken.first;
    } else {
        const std::size_t bytes = elided_ ? 64 : floats * sizeof(float);
        taken = {floats, Array(static_cast<float*>(::operator new[](bytes, std::align_val_t{64})))};
    }
    used_ += taken.first;
    peak_ = std::max(peak_, used_);
    shrink_kept(peak_ - used_);
    if (pooled) pool_used_ += taken.first;
    return Block(this, taken.second.release(), taken.first, pooled);
}

void Memory::release(Block& block) {
    Array array(block.data_);
    used_ -= block.floats_;
    if (block.pooled_) pool_used_ -= block.floats_;
    if (block.floats_ > peak_ - used_) return;
    shrink_kept(peak_ - used_ - block.floats_);
    kept_floats_ += block.floats_;
    kept_.emplace_back(block.floats_, std::move(array));
}

// Frees the oldest blocks first, so that sizes no longer used do not stay forever.
void Memory::shrink_kept(std::size_t limit) {
    std::size_t drop = 0;
    while (kept_floats_ > limit) kept_floats_ -= kept_[drop++].first;
    kept_.erase(kept_.begin(), kept_.begin() + static_cast<std::ptrdiff_t>(drop));
}

}  // namespace tailcut
