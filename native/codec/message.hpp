// Turns one vector into packets, and packets into one vector. This is what tailcut.codec does without a
// group, in the wire format of an op's packets.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "codec/packet_limits.hpp"
#include "wire/header.hpp"

namespace tailcut::codec {

struct MessageSpec {
    wire::Codec codec = wire::Codec::kPlanes;
    int planes = 16;  // 1 to 16; ignored by raw
    std::uint64_t seed = 0;
    PacketLimits limits{1424, 166};

    // Granules of a full packet; 0: not even one fits.
    std::uint32_t packet_granules() const { return limits.granules(codec, planes); }
};

class Message {
public:
    // Needs packet_granules() > 0. Reuses the memory of an earlier message.
    void encode(std::span<const float> x, const MessageSpec& spec);

    std::size_t packets() const { return ends_.size(); }
    std::size_t bytes() const { return ends_.empty() ? 0 : ends_.back(); }
    std::span<const std::byte> packet(std::size_t k) const {
        const std::size_t begin = k == 0 ? 0 : ends_[k - 1];
        return std::span(buffer_).subspan(begin, ends_[k] - begin);
    }

private:
    std::span<std::byte> append(const wire::Header& header);
    void append_block(std::span<const float> z, const BlockSpan& block, const struct Scale& scale,
                      std::uint64_t key, std::uint32_t n, const MessageSpec& spec);
    void append_raw(std::span<const float> x, const MessageSpec& spec);

    std::vector<std::byte> buffer_;
    std::vector<std::size_t> ends_;
};

struct DecodeCounts {
    std::size_t used = 0;
    std::array<std::size_t, wire::kRejectReasons> rejected{};
};
// Packets may come in any order, cut anywhere, incomplete in number, or not ours at all. Planes: the result
// is unbiased in each block that anything came for; with `biased` it has the least squared error. Raw: what
// did not come is zero.
DecodeCounts decode_message(std::span<const std::span<const std::byte>> packets, std::uint64_t seed,
                            bool biased, std::span<float> out);

}  // namespace tailcut::codec
