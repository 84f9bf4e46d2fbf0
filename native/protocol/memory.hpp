// Memory of ops. Two sources, one Block type:
//   the pool: fixed, allocated once; holds what belongs to ops this rank has not reached and what late peers
//             may still need. When it is full, take_pool() says so.
//   the heap: for ops in flight; freed blocks are kept for the next op, at most the peak of bytes in flight.
// Not thread-safe: one Memory per endpoint, which must outlive its blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <new>
#include <utility>
#include <vector>

namespace tailcut {

class Memory;

class Block {
public:
    Block() = default;
    Block(Block&& other) noexcept { swap(other); }
    Block& operator=(Block&& other) noexcept {
        Block(std::move(other)).swap(*this);
        return *this;
    }
    ~Block();

    float* data() const { return data_; }
    explicit operator bool() const { return data_ != nullptr; }

private:
    friend class Memory;
    Block(Memory* home, float* data, std::size_t floats, bool pooled)
        : home_(home), data_(data), floats_(floats), pooled_(pooled) {}
    void swap(Block& other) noexcept {
        std::swap(home_, other.home_);
        std::swap(data_, other.data_);
        std::swap(floats_, other.floats_);
        std::swap(pooled_, other.pooled_);
    }

    Memory* home_ = nullptr;
    float* data_ = nullptr;
    std::size_t floats_ = 0;
    bool pooled_ = false;
};

class Memory {
public:
    explicit Memory(std::size_t pool_bytes);
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    Block take_pool(std::size_t floats);   // an empty Block when there is no room
    Block take_heap(std::size_t floats);

    std::size_t pool_used_bytes() const { return pool_used_ * sizeof(float); }
    std::size_t heap_used_bytes() const { return heap_used_ * sizeof(float); }
    std::size_t heap_kept_bytes() const { return heap_kept_ * sizeof(float); }

private:
    friend class Block;
    struct Freed {
        void operator()(float* data) const { ::operator delete[](data, std::align_val_t{64}); }
    };
    using Array = std::unique_ptr<float[], Freed>;
    static Array allocate(std::size_t floats);
    void release(Block& block);

    Array pool_;
    std::map<std::size_t, std::size_t> free_;               // offset -> floats, first fit
    std::vector<std::pair<std::size_t, Array>> kept_;       // freed heap blocks, reused best fit
    std::size_t pool_used_ = 0, heap_used_ = 0, heap_peak_ = 0, heap_kept_ = 0;
};

}  // namespace tailcut
