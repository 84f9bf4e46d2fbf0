// How much one packet may hold on its way to a receiver.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "codec/blocks.hpp"
#include "wire/header.hpp"

namespace tailcut::codec {

// What switches that trim commonly leave of a payload, of 256 bytes of a frame.
inline constexpr std::uint32_t kCommonTrimBytes = 256 - (14 + 20 + 8) - wire::kHeaderBytes;

struct PacketLimits {
    std::uint32_t payload_bytes = 0;
    // What a switch leaves of a payload; 0: it is not known that any trims.
    std::uint32_t trim_payload_bytes = 0;

    // Lowers these limits to what the other path carries as well. payload_bytes 0 means that nothing is known
    // yet.
    void lower_to(const PacketLimits& other) {
        payload_bytes =
            payload_bytes == 0 ? other.payload_bytes : std::min(payload_bytes, other.payload_bytes);
        if (other.trim_payload_bytes == 0) return;
        trim_payload_bytes = trim_payload_bytes == 0 ? other.trim_payload_bytes
                                                     : std::min(trim_payload_bytes, other.trim_payload_bytes);
    }

    // Granules of a full packet; 0: not even one fits. With planes, a packet holds granules of one block
    // only, plane 1 of all of them survives trimming (with `whole`, all planes do), and each packet of a
    // block holds about as many.
    std::uint32_t granules(wire::Codec codec, int planes, bool whole = false) const {
        constexpr std::uint32_t kCountable = 65535 / kGranule, kInBlock = kBlock / kGranule;
        if (codec == wire::Codec::kRaw)
            return std::min<std::uint32_t>(kCountable, payload_bytes / (kGranule * sizeof(float)));
        const auto table = static_cast<std::uint32_t>(wire::gain_table_bytes(planes, true));
        const std::uint32_t room = payload_bytes - std::min(table, payload_bytes);
        std::uint32_t most = std::min(kInBlock, room / (8 * static_cast<std::uint32_t>(planes)));
        if (const std::uint32_t left = trim_payload_bytes || !whole ? trim_payload_bytes : kCommonTrimBytes) {
            const std::uint32_t first_plane = left / 8;
            const std::uint32_t all_planes =
                (left - std::min(table, left)) / (8 * static_cast<std::uint32_t>(planes));
            most = std::min(most, whole ? std::max(all_planes, std::min(1u, first_plane)) : first_plane);
        }
        if (most == 0) return 0;
        const std::uint32_t packets = (kInBlock + most - 1) / most;
        return (kInBlock + packets - 1) / packets;
    }
};

// Whether a header's run lies in a shard of this length. Runs consist of whole granules, except at the
// shard's end; with planes, a run lies within one block.
inline bool run_fits(const wire::Header& header, std::uint32_t shard_len) {
    const std::uint64_t end = std::uint64_t{header.first} + header.count;
    if (header.first % kGranule != 0 || end > shard_len) return false;
    if (header.count % kGranule != 0 && end != shard_len) return false;
    if (header.codec != wire::Codec::kPlanes || header.empty()) return true;
    const BlockSpan block = Blocks(shard_len).of(header.first);
    return end <= std::uint64_t{block.begin} + block.length;
}

}  // namespace tailcut::codec
