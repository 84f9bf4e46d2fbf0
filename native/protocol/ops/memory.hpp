// Memory of ops, in two accounts:
//   pool:      of fixed size. It holds what belongs to ops that this rank has not reached, and what late
//              peers may still need. take_pool() says when it is used up. Apart from the tables of what came,
//              which take a fraction of it, the pool is all that the network can make a rank allocate.
//   in flight: ops of the local rank. A pooled block moves here when its op is entered.
// Freed blocks are kept for the next op, so that a steady state neither allocates nor touches fresh pages.
// Used and kept blocks together never exceed the peak of what was used. Not thread-safe. Must outlive its
// blocks.
#pragma once

#include <cstddef>
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
    void leave_pool();  // charged to what is in flight from now on
    bool join_pool();   // charged to the pool from now on; false, and nothing changes, if that has no room
    bool pooled() const { return pooled_; }

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
    // `elided`: only the accounts are kept. Blocks hold nothing and must not be looked into.
    explicit Memory(std::size_t pool_bytes, bool elided = false)
        : pool_(pool_bytes / sizeof(float)), elided_(elided) {}
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    Block take_pool(std::size_t floats);  // returns an empty Block when the pool is used up
    Block take(std::size_t floats);       // for an op in flight
    bool could_hold(std::size_t floats) const { return floats + 16 <= pool_; }  // if the pool were empty

    std::size_t pool_used_bytes() const { return pool_used_ * sizeof(float); }
    std::size_t total_bytes() const { return (used_ + kept_floats_) * sizeof(float); }

private:
    friend class Block;
    struct Freed {
        void operator()(float* data) const { ::operator delete[](data, std::align_val_t{64}); }
    };
    using Array = std::unique_ptr<float[], Freed>;
    Block allocate(std::size_t floats, bool pooled);
    void release(Block& block);
    void shrink_kept(std::size_t limit);

    const std::size_t pool_;
    const bool elided_;
    std::size_t pool_used_ = 0, used_ = 0, peak_ = 0, kept_floats_ = 0;
    std::vector<std::pair<std::size_t, Array>> kept_;  // oldest first
};

}  // namespace tailcut
