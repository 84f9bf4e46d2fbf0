#include "wire/header.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <type_traits>

namespace tailcut::wire {
namespace {

static_assert(std::endian::native == std::endian::little, "the wire format is little-endian");

// Byte offsets (docs/wire-format.md, table 1). The name after a slash is the field that FEEDBACK and GOODBYE
// keep at the same offset, and the last name that of STATE.
enum Offset : std::size_t {
    kAtMagic = 0,
    kAtVersion = 1,
    kAtType = 2,
    kAtCodec = 3,  // codec << 5 | planes
    kAtFlags = 4,
    kAtSource = 6,
    kAtGroupTag = 8,  // 6 bytes, followed by 2 bytes of epoch
    kAtEpoch = 14,
    kAtNumber = 16,
    kAtSeq = 20,
    kAtKey = 24,        // / error_energy or served_from / blob_id, 8 bytes
    kAtBucketLen = 28,  // / arrival_us
    kAtFirst = 32,      // / echo_us / blob_first, 8 bytes
    kAtCount = 36,      // / latest, 4 bytes
    kAtShard = 38,
    kAtStamp = 40,
    kAtEntry = 44,     // / delay_us / run_bytes
    kAtScale = 48,     // / lr_scale / blob_bytes, 8 bytes
    kAtGainFull = 52,  // / share
    kAtGainOne = 54,   // / lr_period
    kAtIncarnation = 56,
    kAtLossScaleTag = 58,  // / error_op / edition
    kAtIncast = 60,
    kAtZero = 61,
    kAtStandsFor = 62,  // / report_words
};

std::uint16_t known_flags(std::uint8_t type) {
    if (type == static_cast<std::uint8_t>(Type::kData))
        return kReplyWanted | kGatherStage | kEmpty | kNonFinite | kLastPart | kOver | kMulticast | kVerdict;
    if (type == static_cast<std::uint8_t>(Type::kState)) return kAnswer | kAbsent;
    return kReplyWanted | kGoodbyeKnown | kCutsListed | kForgotten |
           (type == static_cast<std::uint8_t>(Type::kFeedback) ? kMulticast | kAway | kSkipped : 0);
}

bool known_codec(std::uint8_t type, std::uint8_t codec, std::uint8_t planes) {
    const bool data = type == static_cast<std::uint8_t>(Type::kData);
    if (codec == static_cast<std::uint8_t>(Codec::kRaw)) return planes == 0;
    return codec == static_cast<std::uint8_t>(Codec::kPlanes) && planes >= 1 && planes <= kMaxPlanes && data;
}

bool sound_feedback(const Header& header) {
    const bool lr_scale_ok =
        header.lr_scale == 0 || (header.lr_scale >= kLeastLrScale && header.lr_scale <= 1);
    return lr_scale_ok && header.error_energy >= 0 && header.error_energy <= 1;
}

// W7: a scale that a sender may state. With planes, the gains must also be numbers above -1.
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

bool sound_state(const Header& header) {
    if (!header.answer())
        return !header.absent() && header.blob_bytes == 0 && header.run_bytes > 0 &&
               header.run_bytes <= kMostRunBytes;
    if (header.absent()) return header.blob_bytes == 0 && header.run_bytes == 0;
    if (header.edition == 0 || header.run_bytes > kMostRunBytes) return false;
    // Only an empty blob has an empty run.
    return header.blob_first <= header.blob_bytes &&
           header.run_bytes <= header.blob_bytes - header.blob_first &&
           (header.run_bytes > 0 || header.blob_bytes == 0);
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
    constexpr const char* kNames[] = {"short", "version",   "type", "group", "source", "seq",   "shape",
                                      "owner", "duplicate", "late", "pool",  "length", "epoch", "address"};
    static_assert(std::size(kNames) == kRejectReasons);
    return kNames[static_cast<std::size_t>(reason)];
}

HeaderBytes pack(const Header& header) {
    HeaderBytes bytes{};
    put(bytes, kAtMagic, kMagic);
    put(bytes, kAtVersion, kVersion);
    put(bytes, kAtType, static_cast<std::uint8_t>(header.type));
    put(bytes, kAtCodec, static_cast<std::uint8_t>(static_cast<unsigned>(header.codec) << 5 | header.planes));
    put(bytes, kAtFlags, header.flags);
    put(bytes, kAtSource, header.source);
    put(bytes, kAtGroupTag, (header.group_tag & kTagMask) | std::uint64_t{header.epoch} << 48);
    put(bytes, kAtNumber, header.number);
    put(bytes, kAtSeq, header.seq);
    put(bytes, kAtStamp, header.stamp_us);
    put(bytes, kAtIncarnation, header.incarnation);
    put(bytes, kAtIncast, header.incast);
    if (header.type == Type::kData) {
        put(bytes, kAtKey, header.key);
        put(bytes, kAtBucketLen, header.bucket_len);
        put(bytes, kAtFirst, header.first);
        put(bytes, kAtCount, header.count);
        put(bytes, kAtShard, header.shard);
        put(bytes, kAtEntry, header.entry_us);
        put(bytes, kAtScale, header.scale);
        put(bytes, kAtGainFull, header.gain_full);
        put(bytes, kAtGainOne, header.gain_one);
        put(bytes, kAtLossScaleTag, header.loss_scale_tag);
        put(bytes, kAtStandsFor, header.stands_for);
    } else if (header.type == Type::kState) {
        put(bytes, kAtKey, header.blob_id);
        put(bytes, kAtFirst, header.blob_first);
        put(bytes, kAtEntry, header.run_bytes);
        put(bytes, kAtScale, header.blob_bytes);
        put(bytes, kAtLossScaleTag, header.edition);
    } else {
        if (header.flags & kForgotten)
            put(bytes, kAtKey, header.served_from);
        else
            put(bytes, kAtKey, header.error_energy);
        put(bytes, kAtBucketLen, header.arrival_us);
        put(bytes, kAtFirst, header.echo_us);
        put(bytes, kAtCount, header.latest);
        put(bytes, kAtEntry, header.delay_us);
        put(bytes, kAtScale, header.lr_scale);
        put(bytes, kAtGainFull, header.share);
        put(bytes, kAtGainOne, header.lr_period);
        put(bytes, kAtLossScaleTag, header.error_op);
        put(bytes, kAtStandsFor, header.report_words);
    }
    return bytes;
}

Parsed parse(std::span<const std::byte> datagram) {
    Parsed parsed;
    auto refuse = [&](Reject reason) {
        parsed.reason = reason;
        return parsed;
    };
    if (datagram.size() <= kAtVersion) return refuse(Reject::kShort);
    if (get<std::uint8_t>(datagram, kAtMagic) != kMagic ||
        get<std::uint8_t>(datagram, kAtVersion) != kVersion)
        return refuse(Reject::kVersion);
    if (datagram.size() < kHeaderBytes) return refuse(Reject::kShort);
    Header& header = parsed.header;
    const auto type = get<std::uint8_t>(datagram, kAtType);
    const auto codec = get<std::uint8_t>(datagram, kAtCodec);
    const auto take = [&](auto& field, Offset at) {
        field = get<std::remove_reference_t<decltype(field)>>(datagram, at);
    };
    take(header.flags, kAtFlags);
    if (type < static_cast<std::uint8_t>(Type::kData) || type > static_cast<std::uint8_t>(Type::kState) ||
        (header.flags & ~known_flags(type)) || !known_codec(type, codec >> 5, codec & 31))
        return refuse(Reject::kType);
    header.type = static_cast<Type>(type);
    header.codec = static_cast<Codec>(codec >> 5);
    header.planes = codec & 31;
    take(header.source, kAtSource);
    take(header.group_tag, kAtGroupTag);
    header.group_tag &= kTagMask;
    take(header.epoch, kAtEpoch);
    take(header.number, kAtNumber);
    take(header.seq, kAtSeq);
    take(header.stamp_us, kAtStamp);
    take(header.incarnation, kAtIncarnation);
    take(header.incast, kAtIncast);
    // These bytes are reserved: a packet of a later version that uses them must not be taken for one of this
    // version.
    for (std::size_t at = kAtZero; at < (header.type == Type::kState ? kHeaderBytes : kAtStandsFor); ++at)
        if (datagram[at] != std::byte{0}) return refuse(Reject::kType);
    if (header.type == Type::kData) {
        take(header.key, kAtKey);
        take(header.bucket_len, kAtBucketLen);
        take(header.first, kAtFirst);
        take(header.count, kAtCount);
        take(header.shard, kAtShard);
        take(header.entry_us, kAtEntry);
        take(header.scale, kAtScale);
        take(header.gain_full, kAtGainFull);
        take(header.gain_one, kAtGainOne);
        take(header.loss_scale_tag, kAtLossScaleTag);
        take(header.stands_for, kAtStandsFor);
        const bool gather = header.stage() == Stage::kGather;
        if (!sound_scale(header) || (!gather && header.flags & (kMulticast | kVerdict)))
            return refuse(Reject::kShape);
    } else if (header.type == Type::kState) {
        take(header.blob_id, kAtKey);
        take(header.blob_first, kAtFirst);
        take(header.run_bytes, kAtEntry);
        take(header.blob_bytes, kAtScale);
        take(header.edition, kAtLossScaleTag);
        if (!sound_state(header)) return refuse(Reject::kShape);
    } else {
        if (header.flags & kForgotten)
            take(header.served_from, kAtKey);
        else
            take(header.error_energy, kAtKey);
        take(header.arrival_us, kAtBucketLen);
        take(header.echo_us, kAtFirst);
        take(header.latest, kAtCount);
        take(header.delay_us, kAtEntry);
        take(header.lr_scale, kAtScale);
        take(header.share, kAtGainFull);
        take(header.lr_period, kAtGainOne);
        take(header.error_op, kAtLossScaleTag);
        take(header.report_words, kAtStandsFor);
        if (!sound_feedback(header)) return refuse(Reject::kShape);
    }
    parsed.ok = true;
    return parsed;
}

std::uint64_t tag_of(std::span<const std::byte> datagram) {
    return datagram.size() < kHeaderBytes ? 0 : get<std::uint64_t>(datagram, kAtGroupTag) & kTagMask;
}

std::uint16_t source_of(std::span<const std::byte> datagram) {
    return get<std::uint16_t>(datagram, kAtSource);
}

std::size_t stated_payload_bytes(const Header& header) {
    if (header.type == Type::kState) return header.answer() ? header.run_bytes : 0;
    if (header.type != Type::kData) return header.report_words * sizeof(std::uint64_t);
    if (header.empty()) return 0;
    if (header.codec == Codec::kRaw) return std::size_t{header.count} * sizeof(float);
    return std::size_t{granules(header)} * 8 * header.planes +
           gain_table_bytes(header.planes, header.gain_one != 0);
}

std::uint32_t delivered_granules(const Header& header, std::size_t payload_bytes) {
    if (payload_bytes >= stated_payload_bytes(header)) return granules(header);
    const std::size_t first_bits = header.codec == Codec::kRaw ? 64 * sizeof(float) : 8;
    return static_cast<std::uint32_t>(std::min<std::size_t>(granules(header), payload_bytes / first_bits));
}

bool lacks_granules(const Header& header, std::size_t payload_bytes) {
    return !header.empty() && delivered_granules(header, payload_bytes) < granules(header);
}

}  // namespace tailcut::wire
