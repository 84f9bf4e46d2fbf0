#include "protocol/memory.hpp"

#include <algorithm>

namespace tailcut {
namespace {

// Cache-line multiples, and never nothing: an empty bucket has a block like any other.
std::size_t rounded(std::size_t floats) { return std::max<std::size_t>(16, (floats + 15) / 16 * 16); }

}  // namespace

Block::~Block() {
    if (home_) home_->release(*this);
}

Memory::Array Memory::allocate(std::size_t floats) {
    return Array(static_cast<float*>(::operator new[](floats * sizeof(float), std::align_val_t{64})));
}

Memory::Memory(std::size_t pool_bytes) {
    const std::size_t floats = pool_bytes / sizeof(float) / 16 * 16;
    if (floats == 0) return;
    pool_ = allocate(floats);
    free_.emplace(0, floats);
}

Block Memory::take_pool(std::size_t floats) {
    const std::size_t need = rounded(floats);
    const auto hole = std::find_if(free_.begin(), free_.end(), [&](const auto& h) { return h.second >= need; });
    if (hole == free_.end()) return {};
    const auto [offset, size] = *hole;
    free_.erase(hole);
    if (size > need) free_.emplace(offset + need, size - need);
    pool_used_ += need;
    return Block(this, pool_.get() + offset, need, true);
}

Block Memory::take_heap(std::size_t floats) {
    const std::size_t need = rounded(floats);
    auto best = kept_.end();
    for (auto it = kept_.begin(); it != kept_.end(); ++it)
        if (it->first >= need && it->first <= 2 * need && (best == kept_.end() || it->first < best->first)) best = it;
    std::pair<std::size_t, Array> taken;
    if (best != kept_.end()) {
        taken = std::move(*best);
        kept_.erase(best);
        heap_kept_ -= taken.first;
    } else {
        taken = {need, allocate(need)};
    }
    heap_used_ += taken.first;
    heap_peak_ = std::max(heap_peak_, heap_used_);
    return Block(this, taken.second.release(), taken.first, false);
}

void Memory::release(Block& block) {
    if (!block.pooled_) {
        Array array(block.data_);
        heap_used_ -= block.floats_;
        // Oldest first out, so that blocks of a size no longer used do not stay for ever.
        while (!kept_.empty() && heap_kept_ + block.floats_ > heap_peak_) {
            heap_kept_ -= kept_.front().first;
            kept_.erase(kept_.begin());
        }
        heap_kept_ += block.floats_;
        kept_.emplace_back(block.floats_, std::move(array));
        return;
    }
    pool_used_ -= block.floats_;
    auto here = free_.emplace(static_cast<std::size_t>(block.data_ - pool_.get()), block.floats_).first;
    if (const auto next = std::next(here); next != free_.end() && here->first + here->second == next->first) {
        here->second += next->second;
        free_.erase(next);
    }
    if (here != free_.begin())
        if (const auto previous = std::prev(here); previous->first + previous->second == here->first) {
            previous->second += here->second;
            free_.erase(here);
        }
}

}  // namespace tailcut
