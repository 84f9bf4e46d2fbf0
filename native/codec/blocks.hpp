// How a shard is cut into blocks. The cut depends on the shard's length alone, so all ranks cut alike.
//
// The shard is padded to a whole granule and cut into blocks of kBlock coordinates. The remainder is cut into
// descending powers of two of at least a granule, each used at most once. So at most 63 coordinates are
// padding, which are zeros at the end of the last block, and at most nine blocks are shorter than kBlock.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "base/types.hpp"

namespace tailcut::codec {

// Chosen by measurement (docs/codec.md): this size is as fast as smaller ones, and a packet may hold a block
// at most.
inline constexpr std::uint32_t kBlockLog2 = 15;
inline constexpr std::uint32_t kBlock = 1u << kBlockLog2;

struct BlockSpan {
    std::uint32_t index = 0;
    std::uint32_t begin = 0;  // within the shard
    // A power of two, at least a granule. The last block may end up to 63 coordinates beyond the shard.
    std::uint32_t length = 0;

    std::uint32_t first_granule() const { return begin / kGranule; }
    std::uint32_t last_granule() const { return begin / kGranule + length / kGranule; }
};

class Blocks {
public:
    explicit Blocks(std::uint32_t shard_len) : padded_((std::uint64_t{shard_len} + kGranule - 1) & ~63ull) {}

    std::uint64_t padded() const { return padded_; }
    std::uint32_t count() const {
        return static_cast<std::uint32_t>(padded_ / kBlock) +
               static_cast<std::uint32_t>(std::popcount(padded_ % kBlock));
    }
    // The block that holds a coordinate, which must be below padded().
    BlockSpan of(std::uint32_t coordinate) const {
        const auto whole = static_cast<std::uint32_t>(padded_ / kBlock);
        if (coordinate / kBlock < whole) return {coordinate / kBlock, coordinate / kBlock * kBlock, kBlock};
        // In the remainder, the block of length 2^k begins at the sum of the remainder's bits above bit k.
        const auto rest = static_cast<std::uint32_t>(padded_ % kBlock);
        const std::uint32_t offset = coordinate % kBlock;
        const std::uint32_t length = std::bit_floor(offset ^ rest);
        const std::uint32_t begin = rest & ~(2 * length - 1);
        return {whole + static_cast<std::uint32_t>(std::popcount(begin)), whole * kBlock + begin, length};
    }

private:
    std::uint64_t padded_;
};

// Rule 8: all ranks use the same rotation, and every op, shard and block has a different one.
class BlockKeys {
public:
    constexpr BlockKeys(std::uint64_t seed, Seq seq, Rank shard)
        : base_(mix(mix(seed) ^ (std::uint64_t{shard} << 32 | seq))) {}

    constexpr std::uint64_t of(const BlockSpan& block) const { return mix(base_ ^ block.index); }

private:
    std::uint64_t base_;
};

}  // namespace tailcut::codec
