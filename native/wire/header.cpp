#include "wire/header.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

namespace tailcut::wire {
namespace {

static_assert(std::endian::native == std::endian::little, "wire version 1 is little-endian");

// Byte offsets (docs/wire-format.md, table 1).
enum Offset : std::size_t {
    kAtMagic = 0,
    kAtVersion = 1,
    kAtType = 2,
    kAtFlags = 3,
    kAtGroupTag = 4,  // 6 bytes
    kAtNumber = 10,
    kAtSource = 12,
    kAtShard = 14,
    kAtSeq = 16,
    kAtBucketLen = 20,  // DATA; FEEDBACK carries arrival_us here,
    kAtFirst = 24,      // echo_us here,
    kAtCount = 28,      // latest here,
    kAtCodec = 30,      // codec << 5 | planes
    kAtIncast = 31,
    kAtStamp = 32,
    kAtEntry = 36,     // and delay_us here
    kAtScale = 40,     // lr_scale in FEEDBACK, and below its period
    kAtGainFull = 44,  // share in FEEDBACK
    kAtGainOne = 46,
};

std::uint8_t known_flags(std::uint8_t type) {
    if (type == static_cast<std::uint8_t>(Type::kData))
        return kReplyWanted | kGatherStage | kEmpty | kNonFinite | kLastPart | kOver | kMulticast;
    return kReplyWanted | kGoodbyeKnown |
           (type == static_cast<std::uint8_t>(Type::kFeedback) ? kMulticast : 0);
}

bool known_codec(std::uint8_t type, std::uint8_t flags, std::uint8_t codec, std::uint8_t planes) {
    const bool data = type == static_cast<std::uint8_t>(Type::kData);
    if (codec == static_cast<std::uint8_t>(Codec::kRaw))
        return planes == 0 || (planes <= kMaxPlanes && data && flags & kGatherStage);
    return codec == static_cast<std::uint8_t>(Codec::kPlanes) && planes >= 1 && planes <= kMaxPlanes && data;
}

bool sound_lr_scale(const Header& header) {
    return header.type == Type::kData || header.lr_scale == 0 ||
           (header.lr_scale >= kLeastLrScale && header.lr_scale <= 1);
}

// W7: a scale that a sender may state; for planes, gains that are numbers above -1.
bool sound_scale(const Header& header) {
    if (header.empty()) return true;
    const bool scale_ok = header.scale >= 0 && header.scale <= std::numeric_limits<float>::max();
    if (header.codec == Codec::kRaw) return scale_ok;
    const auto sound = [](std::uint16_t half) {
        return (half & 0x7C00) != 0x7C00 && (half & 0x8000 ? (half & 0x7FFF) < 0x3C00 : true);
    };
    const bool marked = header.scale != header.scale && header.flags & kNonFinite;
    return (scale_ok || marked) && sound(header.gain_full) && sound(header.gain_one);
}

std::uint32_t granules(const Header& header) { return (header.count + 63u) / 64; }

template <typename T>
void put(HeaderBytes& bytes, Offset at, T value) {
    std::memcpy(bytes.data() + at, &value, sizeof(T));
}

template <typename T>
T get(std::span<const std::byte> bytes, Offset at) {
    T value;
    std::memcpy(&value, bytes.data() + at, sizeof(T));
    return value;
}

}  // namespace

const char* name(Reject reason) {
    constexpr const char* kNames[] = {"short", "version", "type",      "group", "source", "seq",
                                      "shape", "owner",   "duplicate", "late",  "pool",   "length"};
    static_assert(std::size(kNames) == kRejectReasons);
    return kNames[static_cast<std::size_t>(reason)];
}

HeaderBytes pack(const Header& header) {
    HeaderBytes bytes{};
    put(bytes, kAtMagic, kMagic);
    put(bytes, kAtVersion, kVersion);
    put(bytes, kAtType, static_cast<std::uint8_t>(header.type));
    put(bytes, kAtFlags, header.flags);
    put(bytes, kAtGroupTag, (header.group_tag & kTagMask) | std::uint64_t{header.number} << 48);
    put(bytes, kAtSource, header.source);
    put(bytes, kAtShard, header.shard);
    put(bytes, kAtSeq, header.seq);
    const bool data = header.type == Type::kData;
    put(bytes, kAtBucketLen, data ? header.bucket_len : header.arrival_us);
    put(bytes, kAtFirst, data ? header.first : header.echo_us);
    put(bytes, kAtCount, data ? header.count : header.latest);
    put(bytes, kAtCodec, static_cast<std::uint8_t>(static_cast<unsigned>(header.codec) << 5 | header.planes));
    put(bytes, kAtIncast, header.incast);
    put(bytes, kAtStamp, header.stamp_us);
    put(bytes, kAtEntry, data ? header.entry_us : header.delay_us);
    put(bytes, kAtScale, data ? header.scale : header.lr_scale);
    put(bytes, kAtGainFull, data ? header.gain_full : header.share);
    put(bytes, kAtGainOne, data ? header.gain_one : header.lr_period);
    return bytes;
}

Parsed parse(std::span<const std::byte> datagram) {
    Parsed parsed;
    if (datagram.size() < kHeaderBytes) return parsed;
    auto refuse = [&](Reject reason) {
        parsed.reason = reason;
        return parsed;
    };
    if (get<std::uint8_t>(datagram, kAtMagic) != kMagic ||
        get<std::uint8_t>(datagram, kAtVersion) != kVersion)
        return refuse(Reject::kVersion);
    Header& header = parsed.header;
    const auto type = get<std::uint8_t>(datagram, kAtType);
    header.flags = get<std::uint8_t>(datagram, kAtFlags);
    const auto codec = get<std::uint8_t>(datagram, kAtCodec);
    if (type < static_cast<std::uint8_t>(Type::kData) || type > static_cast<std::uint8_t>(Type::kGoodbye) ||
        (header.flags & ~known_flags(type)) || !known_codec(type, header.flags, codec >> 5, codec & 31))
        return refuse(Reject::kType);
    header.type = static_cast<Type>(type);
    header.codec = static_cast<Codec>(codec >> 5);
    header.planes = codec & 31;
    header.group_tag = get<std::uint64_t>(datagram, kAtGroupTag) & kTagMask;
    header.number = get<std::uint16_t>(datagram, kAtNumber);
    header.source = get<std::uint16_t>(datagram, kAtSource);
    header.shard = get<std::uint16_t>(datagram, kAtShard);
    header.seq = get<std::uint32_t>(datagram, kAtSeq);
    const bool data = header.type == Type::kData;
    (data ? header.bucket_len : header.arrival_us) = get<std::uint32_t>(datagram, kAtBucketLen);
    (data ? header.first : header.echo_us) = get<std::uint32_t>(datagram, kAtFirst);
    (data ? header.count : header.latest) = get<std::uint16_t>(datagram, kAtCount);
    header.incast = get<std::uint8_t>(datagram, kAtIncast);
    header.stamp_us = get<std::uint32_t>(datagram, kAtStamp);
    (data ? header.entry_us : header.delay_us) = get<std::uint32_t>(datagram, kAtEntry);
    (data ? header.scale : header.lr_scale) = get<float>(datagram, kAtScale);
    (data ? header.gain_full : header.share) = get<std::uint16_t>(datagram, kAtGainFull);
    (data ? header.gain_one : header.lr_period) = get<std::uint16_t>(datagram, kAtGainOne);
    if (!sound_scale(header) || !sound_lr_scale(header)) return refuse(Reject::kShape);
    if (data && header.multicast() && header.stage() != Stage::kGather) return refuse(Reject::kShape);
    parsed.ok = true;
    return parsed;
}

std::uint64_t tag_of(std::span<const std::byte> datagram) {
    return datagram.size() < kHeaderBytes ? 0 : get<std::uint64_t>(datagram, kAtGroupTag) & kTagMask;
}

std::size_t stated_payload_bytes(const Header& header) {
    if (header.type != Type::kData || header.empty()) return 0;
    if (header.codec == Codec::kRaw) return std::size_t{header.count} * sizeof(float);
    return std::size_t{granules(header)} * 8 * header.planes +
           gain_table_bytes(header.planes, header.gain_one != 0);
}

std::uint32_t delivered_granules(const Header& header, std::size_t payload_bytes) {
    if (payload_bytes >= stated_payload_bytes(header)) return granules(header);
    const std::size_t first_bits = header.codec == Codec::kRaw ? 64 * sizeof(float) : 8;
    return static_cast<std::uint32_t>(std::min<std::size_t>(granules(header), payload_bytes / first_bits));
}

}  // namespace tailcut::wire
