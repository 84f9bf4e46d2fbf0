// The datagram header of wire version 2 (docs/wire-format.md). No other code knows its bytes. It checks what
// one header can prove about itself; the endpoint checks whether the header fits the group.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace tailcut::wire {

// One cache line, so that the payload behind it stays aligned.
inline constexpr std::size_t kHeaderBytes = 64;
inline constexpr std::uint8_t kMagic = 0x7C;
inline constexpr std::uint8_t kVersion = 2;
inline constexpr std::uint32_t kNotEntered = 0xFFFFFFFF;
inline constexpr std::uint64_t kTagMask = (std::uint64_t{1} << 48) - 1;

enum class Type : std::uint8_t { kData = 1, kFeedback = 2, kGoodbye = 3, kState = 4 };
enum class Codec : std::uint8_t { kRaw = 0, kPlanes = 1 };
enum class Stage : std::uint8_t { kScatter = 0, kGather = 1 };

enum Flag : std::uint16_t {
    // DATA
    kGatherStage = 1,  // set: the owner's mean; clear: a contribution to the owner
    kEmpty = 2,        // the run has no values: an abstention in SCATTER; in GATHER, no rank delivered it
    kNonFinite = 4,    // some rank's bucket of this op holds an Inf or a NaN
    kLastPart = 16,    // the end of a contribution or a mean: what is still missing was lost or overtaken
    kOver = 128,       // on an EMPTY contribution: the source has ended the op and will not apply its mean
    kVerdict = 256,    // GATHER: a contribution that the owner has accepted holds an Inf or a NaN
    // FEEDBACK, GOODBYE
    kGoodbyeKnown = 1,  // the destination's GOODBYE has been heard
    kCutsListed = 2,    // the second half of the payload lists means that came trimmed
    kForgotten = 4,     // served_from stands in the place of error_energy
    kAway = 16,         // FEEDBACK: the source will enter no op for a while, because it evaluates, say
    kSkipped = 128,     // FEEDBACK: the source has a later state, and takes no means of ops before seq
    // STATE
    kAnswer = 1,  // set: a run of a blob; clear: a request for one
    kAbsent = 2,  // on an answer: the source does not offer the blob
    // DATA, FEEDBACK, GOODBYE
    kReplyWanted = 8,  // answer at once
    // all
    kExtension = 64,  // key id, counter and tag follow the header; not implemented, so refused
    // DATA of GATHER, FEEDBACK
    // its number, or what it reports, is from the one count that a source keeps for all members
    kMulticast = 32,
};
// Why a datagram was dropped. Every datagram from the network is used or counted under exactly one of these.
enum class Reject : std::uint8_t {
    kShort,      // W1: shorter than a header
    kVersion,    // W2: wrong magic or version
    kType,       // W3: unknown type, flag, codec or number of planes
    kGroup,      // W4: another group's tag
    kSource,     // W5: the source is not another member of the group
    kSeq,        // W6: an op outside the window
    kShape,      // W7: a shard, run, length or scale that does not fit the op
    kOwner,      // W8: a shard that its source, or the receiver, does not own in this op
    kDuplicate,  // W9: a run that has already arrived
    kLate,       // W10: a contribution to a closed SCATTER
    kPool,       // W12: an op that this rank has not reached, and no room is left to keep it
    kLength,     // W11: more bucket lengths for one op than can be told apart
    kEpoch,      // W13: another epoch than that of the op here, or another incarnation of the source
    kAddress,    // W14: it did not come from an address of its source; the driver checks this
    kCount,
};
inline constexpr std::size_t kRejectReasons = static_cast<std::size_t>(Reject::kCount);
const char* name(Reject reason);

struct Header {
    // all
    Type type = Type::kData;
    std::uint16_t flags = 0;
    std::uint8_t incast = 0;      // senders that the source accepts at once; 0: unstated
    std::uint64_t group_tag = 0;  // 48 bits
    // Which agreement on the owners: in DATA that of the op, else the latest that the source knows of.
    std::uint16_t epoch = 0;
    std::uint16_t incarnation = 0;  // which incarnation of the source sent it
    std::uint16_t source = 0;
    std::uint32_t number = 0;  // of the datagram, counted per source and destination; but see kMulticast
    // DATA: the op; FEEDBACK: ops entered; GOODBYE: the first op neither entered nor served; STATE: the fetch,
    // as the rank that asks counts them.
    std::uint32_t seq = 0;
    std::uint32_t stamp_us = 0;  // strictly increasing per source and destination

    // DATA
    std::uint32_t key = 0;             // hash of the bucket's key; 0: the bucket has none
    std::uint16_t loss_scale_tag = 0;  // which loss scale the values were multiplied by; 0: none
    std::uint16_t shard = 0;
    std::uint32_t bucket_len = 0;  // coordinates
    std::uint32_t first = 0;       // first coordinate of the run, within its shard
    std::uint16_t count = 0;       // coordinates in the run; 0 with kEmpty: the whole shard
    Codec codec = Codec::kRaw;
    std::uint8_t planes = 0;               // bits per coordinate; raw: 0
    std::uint32_t entry_us = kNotEntered;  // age of the source's entry into the op when this was sent
    // planes: σ of the block; NaN, together with kNonFinite, if it holds an Inf or a NaN. raw: 0
    float scale = 0;
    // planes: measured gain at the sent planes, fp16, as codec/gains.hpp defines it.
    std::uint16_t gain_full = 0;
    std::uint16_t gain_one = 0;    // the same at one plane; 0: not measured, and no table follows plane 1
    std::uint16_t stands_for = 0;  // in the columns of a grid: the number of contributions in it, fp16

    // FEEDBACK, GOODBYE
    // echo_us, arrival_us and latest describe the latest datagram received from the destination: its stamp
    // (0: none came), its arrival time by the source's clock, and its number. delay_us is the least (arrival
    // - stamp) since the last FEEDBACK.
    std::uint32_t echo_us = 0, arrival_us = 0, delay_us = 0;
    std::uint32_t latest = 0;
    std::uint16_t report_words = 0;  // of the payload; one that came shorter was trimmed and says nothing
    // What came from the destination recently, in 1/256 of the mean over all sources; 0: unknown.
    std::uint16_t share = 0;
    // The learning rate's factor that the source knows, and the period in which it begins to hold; 0: none.
    float lr_scale = 0;
    std::uint16_t lr_period = 0;
    // The share of the energy of the destination's mean that the source lacked in the latest op that it has
    // ended, and that op's seq modulo 2^16.
    float error_energy = 0;
    std::uint16_t error_op = 0;
    std::uint32_t served_from = 0;  // with kForgotten: the source has no means of earlier ops any more

    // STATE: a run of the bytes of a blob
    std::uint64_t blob_id = 0;
    std::uint64_t blob_first = 0;  // first byte of the run
    std::uint64_t blob_bytes = 0;  // of the whole blob; a request: 0
    std::uint32_t run_bytes = 0;   // asked for, or in the payload
    // Which offer of this id it is; 0 in a request that takes any. Two offers of one id are never mixed.
    std::uint16_t edition = 0;

    Stage stage() const { return flags & kGatherStage ? Stage::kGather : Stage::kScatter; }
    bool empty() const { return flags & kEmpty; }
    bool answer() const { return flags & kAnswer; }
    bool absent() const { return flags & kAbsent; }
    bool multicast() const { return flags & kMulticast; }
};

using HeaderBytes = std::array<std::byte, kHeaderBytes>;

HeaderBytes pack(const Header& header);

struct Parsed {
    Header header;
    bool ok = false;
    Reject reason = Reject::kShort;
};
Parsed parse(std::span<const std::byte> datagram);
// Reads only the group tag; returns 0 if the datagram is shorter than a header.
std::uint64_t tag_of(std::span<const std::byte> datagram);
// Reads only the source. The datagram must be at least as long as a header.
std::uint16_t source_of(std::span<const std::byte> datagram);

inline constexpr std::uint32_t kMostRunBytes = 65'535;  // no datagram holds more
inline constexpr int kMaxPlanes = 16;
inline constexpr float kLeastLrScale = 0.05f;
inline constexpr int kMeasuredPlanes = 9;  // gains are stated up to this number of planes
// The bytes of the table of gains at 2 and more planes. The table follows plane 1 if the gains were measured.
constexpr std::size_t gain_table_bytes(int planes, bool measured) {
    const int stated = planes - 2 < kMeasuredPlanes - 1 ? planes - 2 : kMeasuredPlanes - 1;
    return measured && stated > 0 ? 2 * static_cast<std::size_t>(stated) : 0;
}

// The payload of FEEDBACK and GOODBYE: words of 64 bits, one bit per number, set if that number has come.
// `latest` lies in the last word, where the bits of later numbers are set as well. Every number before the
// first word has come: this holds because a source has at most kMostInFlight numbers in flight. With
// kCutsListed as many words follow for the same numbers: a bit is set if a mean came trimmed and is wanted whole.
inline constexpr std::size_t kReportWords = 128;
inline constexpr std::uint32_t kMostInFlight = 64 * (kReportWords - 1);

// The payload bytes that an untrimmed packet with this header carries.
std::size_t stated_payload_bytes(const Header& header);
// The number of granules, counted from the first, that a packet delivers when only `payload_bytes` of its
// payload came. A raw granule counts if it is whole; with planes, a granule counts if its word of plane 1
// came.
std::uint32_t delivered_granules(const Header& header, std::size_t payload_bytes);
// Whether trimming has left out some of its granules.
bool lacks_granules(const Header& header, std::size_t payload_bytes);

}  // namespace tailcut::wire
