#include "codec/message.hpp"

#include <algorithm>
#include <cstring>
#include <optional>

#include "codec/block_sum.hpp"
#include "codec/raw.hpp"
#include "codec/rotate.hpp"

namespace tailcut::codec {
namespace {

struct Piece {
    wire::Header header;
    std::span<const std::byte> payload;
};

std::optional<wire::Reject> check(const wire::Header& header, std::size_t payload_bytes, std::uint32_t n) {
    if (header.type != wire::Type::kData) return wire::Reject::kType;
    if (header.seq != 0) return wire::Reject::kSeq;
    if (header.bucket_len != n || header.shard != 0 || header.count == 0 || header.empty() ||
        payload_bytes > wire::stated_payload_bytes(header) || !run_fits(header, n))
        return wire::Reject::kShape;
    return std::nullopt;
}

// The usable packets, ordered by codec and by place. Of two packets for one place, the longer comes first.
std::vector<Piece> sorted(std::span<const std::span<const std::byte>> packets, std::uint32_t n,
                          DecodeCounts& counts) {
    std::vector<Piece> pieces;
    pieces.reserve(packets.size());
    const auto refuse = [&](wire::Reject reason) { ++counts.rejected[static_cast<std::size_t>(reason)]; };
    for (const auto& packet : packets) {
        const wire::Parsed parsed = wire::parse(packet);
        if (!parsed.ok) {
            refuse(parsed.reason);
            continue;
        }
        const auto payload = packet.subspan(wire::kHeaderBytes);
        if (const auto reason = check(parsed.header, payload.size(), n))
            refuse(*reason);
        else
            pieces.push_back({parsed.header, payload});
    }
    const auto before = [](const Piece& a, const Piece& b) {
        if (a.header.codec != b.header.codec) return a.header.codec > b.header.codec;
        if (a.header.first != b.header.first) return a.header.first < b.header.first;
        return a.payload.size() > b.payload.size();
    };
    if (!std::is_sorted(pieces.begin(), pieces.end(), before))
        std::stable_sort(pieces.begin(), pieces.end(), before);
    std::uint64_t end = 0;
    wire::Codec codec = wire::Codec::kPlanes;
    std::erase_if(pieces, [&](const Piece& piece) {
        if (piece.header.codec != codec) codec = piece.header.codec, end = 0;
        const bool overlaps = piece.header.first < end;
        if (overlaps)
            refuse(wire::Reject::kDuplicate);
        else
            end = std::uint64_t{piece.header.first} + piece.header.count;
        return overlaps;
    });
    counts.used = pieces.size();
    return pieces;
}

void decode_block(std::span<const Piece> pieces, const BlockSpan& block, std::uint64_t key, bool biased,
                  std::span<float> z, std::span<float> out) {
    BlockSum sum;
    std::uint32_t at = 0;
    for (const Piece& piece : pieces) {
        const std::uint32_t first = piece.header.first - block.begin;
        std::fill(z.begin() + at, z.begin() + first, 0.0f);
        const PlanesHead head = head_of(piece.header);
        sum.add(head, piece.payload, z.subspan(first));
        at = first + head.granules * kGranule;
    }
    std::fill(z.begin() + at, z.end(), 0.0f);
    sum.rotate_back(z, out, key, biased ? 1.0 : sum.unbiasing(block.length));
}

}  // namespace

std::span<std::byte> Message::append(const wire::Header& header) {
    const std::size_t begin = bytes(), size = wire::kHeaderBytes + wire::stated_payload_bytes(header);
    ends_.push_back(begin + size);
    if (buffer_.size() < begin + size) buffer_.resize(2 * (begin + size));
    const auto head = wire::pack(header);
    std::copy(head.begin(), head.end(), buffer_.begin() + static_cast<std::ptrdiff_t>(begin));
    return std::span(buffer_).subspan(begin + wire::kHeaderBytes, size - wire::kHeaderBytes);
}

void Message::append_block(std::span<const float> z, const BlockSpan& block, const Scale& scale,
                           std::uint64_t key, std::uint32_t n, const MessageSpec& spec) {
    const Gains gains = scale.far_from_gaussian() ? measure_gains(z, scale, key, spec.planes) : Gains{};
    const std::uint32_t granules = block.length / kGranule;
    for (std::uint32_t g = 0; g < granules;) {
        const std::uint32_t many = std::min(spec.packet_granules(), granules - g);
        const PlanesHead head = head_of(many, spec.planes, scale, gains);
        wire::Header header;
        header.flags = scale.non_finite ? wire::kNonFinite : 0;
        header.bucket_len = n;
        put_run(head, block.first_granule() + g, n, header);
        codec::encode(z.subspan(g * kGranule, many * kGranule), head, scale, gains, key, g, append(header));
        g += many;
    }
}

void Message::append_raw(std::span<const float> x, const MessageSpec& spec) {
    const std::size_t most = std::size_t{spec.packet_granules()} * kGranule;
    for (std::size_t at = 0; at < x.size(); at += most) {
        const auto run = x.subspan(at, std::min(most, x.size() - at));
        wire::Header header;
        header.flags = has_non_finite(run) ? wire::kNonFinite : 0;
        header.bucket_len = static_cast<std::uint32_t>(x.size());
        header.first = static_cast<std::uint32_t>(at);
        header.count = static_cast<std::uint16_t>(run.size());
        std::memcpy(append(header).data(), run.data(), run.size_bytes());
    }
}

void Message::encode(std::span<const float> x, const MessageSpec& spec) {
    ends_.clear();
    if (spec.codec == wire::Codec::kRaw) return append_raw(x, spec);
    const auto n = static_cast<std::uint32_t>(x.size());
    const Blocks blocks(n);
    const BlockKeys keys(spec.seed, 0, 0);
    std::vector<float> work(kBlock), padded;
    for (std::uint64_t at = 0; at < blocks.padded();) {
        const BlockSpan block = blocks.of(static_cast<std::uint32_t>(at));
        auto in = x.subspan(block.begin, std::min<std::size_t>(block.length, x.size() - block.begin));
        if (in.size() < block.length) {
            padded.assign(block.length, 0.0f);
            std::copy(in.begin(), in.end(), padded.begin());
            in = padded;
        }
        const std::uint64_t key = keys.of(block);
        const auto z = std::span(work).first(block.length);
        const Scale scale = rotate_and_scale(in, z, key);
        append_block(z, block, scale, key, n, spec);
        at += block.length;
    }
}

DecodeCounts decode_message(std::span<const std::span<const std::byte>> packets, std::uint64_t seed,
                            bool biased, std::span<float> out) {
    const auto n = static_cast<std::uint32_t>(out.size());
    const Blocks blocks(n);
    DecodeCounts counts;
    const std::vector<Piece> pieces = sorted(packets, n, counts);
    const BlockKeys keys(seed, 0, 0);
    std::vector<float> work(kBlock);
    auto next = pieces.begin();
    for (std::uint64_t at = 0; at < blocks.padded();) {
        const BlockSpan block = blocks.of(static_cast<std::uint32_t>(at));
        at += block.length;
        const auto begin = next;
        while (next != pieces.end() && next->header.codec == wire::Codec::kPlanes && next->header.first < at)
            ++next;
        const auto here =
            out.subspan(block.begin, std::min<std::size_t>(block.length, out.size() - block.begin));
        if (begin == next)
            std::fill(here.begin(), here.end(), 0.0f);
        else
            decode_block({begin, next}, block, keys.of(block), biased, std::span(work).first(block.length),
                         here);
    }
    for (; next != pieces.end(); ++next)  // raw: whole coordinates only
        std::memcpy(out.data() + next->header.first, next->payload.data(),
                    next->payload.size() / sizeof(float) * sizeof(float));
    return counts;
}

}  // namespace tailcut::codec
