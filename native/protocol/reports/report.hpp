// What one op reports to its caller: plain values, complete when the op ends. Ranks are those of the
// endpoint's group. Python sees of each struct the fields that it lists (bind_reports.cpp and
// src/tailcut/report.py).
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "protocol/ops/granules.hpp"
#include "protocol/ops/terms.hpp"
#include "protocol/reports/fates.hpp"
#include "protocol/reports/fields.hpp"
#include "protocol/reports/traffic.hpp"
#include "protocol/values/energies.hpp"
#include "wire/header.hpp"

namespace tailcut {

enum class Status : std::uint8_t {
    // results
    kComplete,  // every granule of the mean was answered
    kPartial,   // the op ended before that: what is missing is zero and named below
    kVoid,      // its epoch was replaced: nothing was applied; told as kPartial
    kBehind,    // more than the window behind the group: nothing was reduced, and seq has jumped
    // errors
    kLengthMismatch,  // the ranks do not agree on the bucket's length, and this rank is not in the majority
    kClosed,          // the group was closed while the op was in flight
    kSeqExhausted,    // seq would wrap
    kFailed,          // the engine had to stop
};
constexpr bool is_error(Status status) { return status > Status::kBehind; }
// Nothing of the op was applied, and nothing of it is carried.
constexpr bool is_void(Status status) { return status == Status::kVoid || status == Status::kBehind; }
constexpr const char* name(Status status) {
    constexpr const char* kNames[] = {"complete",        "partial", "partial",       "behind",
                                      "length_mismatch", "closed",  "seq_exhausted", "failed"};
    return kNames[static_cast<std::size_t>(status)];
}

// What ended a stage. GATHER ends together with the op.
enum class Ending : std::uint8_t {
    kAll,       // everything had come
    kGrace,     // the last parts had come, and the grace had passed
    kAbsent,    // all who had entered had delivered, and the rest was not waited for
    kBound,     // its t_B had passed
    kDeadline,  // the op's deadline had passed, or the caller ended it
};
constexpr const char* name(Ending ending) {
    constexpr const char* kNames[] = {"all", "grace", "absent", "bound", "deadline"};
    return kNames[static_cast<std::size_t>(ending)];
}

// Time since this rank's own entry into the op, negative before it; none: not known.
using SinceEntry = std::optional<Duration>;

// One stage of an op at this rank.
struct StageReport {
    std::uint32_t planes = 0;  // bits per coordinate of what this rank sent in the stage; 0: raw
    Ending ended_by = Ending::kDeadline;
    // SCATTER: the ceil(N/2)-th rank entered. GATHER: the own shard closed, or the own entry.
    SinceEntry began;
    SinceEntry ended;  // SCATTER: the own shard closed; GATHER: the op ended
    // Coordinates summed over all links; LinkStage has them by link.
    std::uint64_t coords = 0, missing = 0, empty = 0;

    template <typename Visit>
    static constexpr void visit_fields(Visit&& visit) {
        visit("planes", &StageReport::planes);
        visit("ended_by", &StageReport::ended_by);
        visit("began_s", &StageReport::began);
        visit("ended_s", &StageReport::ended);
        visit("coords", &StageReport::coords);
        visit("missing", &StageReport::missing);
        visit("empty", &StageReport::empty);
    }
};

// What came from one rank in one stage. SCATTER: its contribution to the own shard; GATHER: the mean of its
// shard.
struct LinkStage {
    std::uint32_t coords = 0;   // of the shard
    std::uint32_t missing = 0;  // of these, how many did not come in time
    std::uint32_t empty = 0;    // GATHER: how many came EMPTY
    SinceEntry last;            // when the latest packet came

    template <typename Visit>
    static constexpr void visit_fields(Visit&& visit) {
        visit("coords", &LinkStage::coords);
        visit("missing", &LinkStage::missing);
        visit("empty", &LinkStage::empty);
        visit("last_s", &LinkStage::last);
    }
};

// One rank, as this rank saw it in the op.
struct LinkReport {
    SinceEntry entered;
    bool silent = false;     // not waited for
    bool abstained = false;  // it said that it contributes nothing
    LinkStage scatter, gather;
    // DATA packets since the last report: sent to it and found lost, received from it and missing in between.
    std::uint32_t sent_packets = 0, sent_lost_packets = 0;
    std::uint32_t received_packets = 0, received_lost_packets = 0;
    // Of DATA sent to it by unicast since the last report: what came, and how long any was in flight.
    std::uint32_t delivered_bytes = 0;
    Duration in_flight = 0;
    // The share of this rank's mean that the peer says it lacked, since the last report.
    float lacked_frac = 0;
    bool awaited = true;  // SCATTER of the own shard has waited for it
    Seq behind_ops = 0;   // ops up to this one that it has not entered, as far as is known
    bool left = false;    // it has said goodbye to the group

    template <typename Visit>
    static constexpr void visit_fields(Visit&& visit) {
        visit("entered_s", &LinkReport::entered);
        visit("silent", &LinkReport::silent);
        visit("abstained", &LinkReport::abstained);
        visit("scatter", &LinkReport::scatter);
        visit("gather", &LinkReport::gather);
        visit("sent_packets", &LinkReport::sent_packets);
        visit("sent_lost_packets", &LinkReport::sent_lost_packets);
        visit("received_packets", &LinkReport::received_packets);
        visit("received_lost_packets", &LinkReport::received_lost_packets);
        visit("delivered_bytes", &LinkReport::delivered_bytes);
        visit("in_flight_s", &LinkReport::in_flight);
        visit("lacked_frac", &LinkReport::lacked_frac);
        visit("awaited", &LinkReport::awaited);
        visit("behind_ops", &LinkReport::behind_ops);
        visit("left", &LinkReport::left);
    }
};

// A stage of an earlier op that was cut, and whose missing values have come in the meantime.
struct LateCompletion {
    Seq seq;
    wire::Stage stage;
    std::uint32_t bucket_len;
    Duration took;

    template <typename Visit>
    static constexpr void visit_fields(Visit&& visit) {
        visit("seq", &LateCompletion::seq);
        visit("stage", &LateCompletion::stage);
        visit("length", &LateCompletion::bucket_len);
        visit("took_s", &LateCompletion::took);
    }
};

struct OpReport {
    Ticket ticket = 0;
    Status status = Status::kComplete;
    Seq seq = 0;
    Seq behind_ops = 0;
    std::uint32_t bucket_len = 0;
    Rank own_shard = 0;
    std::uint16_t epoch = 0;        // of the op
    std::uint16_t heard_epoch = 0;  // the latest that anybody has spoken of
    Rank place = 0;                 // index of this rank among the links; in a grid, the row
    bool non_finite = false;
    bool contributed = true;
    bool carried = false;  // what did not come in time enters a later op of the bucket, if it comes (rule 9)
    bool coding_carried = false;  // what coding takes enters the next op of the bucket
    Time entered_at = 0, ended_at = 0;
    StageReport scatter, gather;
    std::vector<LinkReport> links;  // by rank
    Traffic traffic;
    Energies energies;
    LrScale lr_scale;  // the latest known
    std::vector<LateCompletion> late;
    std::uint64_t carried_coords = 0;  // late means of earlier ops that were added to the result
    std::uint32_t late_coords = 0;     // of the previous op's means: came after its end and before this op's
    std::uint32_t split_verdicts = 0;  // since the last report: ops that others skipped, heard of too late
    std::vector<OpReport> column;      // in a grid: ops of the column that ended since the last report
    // kLengthMismatch: by rank, the length that it stated, including this rank.
    std::vector<std::optional<std::uint32_t>> stated_lengths;

    Terms terms;  // as this rank had decided them

    // With Settings::record_fates: which granules arrived, and what else the ledger keeps.
    std::vector<GranuleSet> contributions;  // by rank, within the own shard
    std::vector<GranuleSet> answered;       // by shard: those that came, with a mean or EMPTY
    std::vector<GranuleSet> held;           // by shard: those that came with a mean
    std::vector<std::uint32_t> granules;    // by shard: how many there are
    std::vector<Cut> cuts;                  // packets that came trimmed
    std::vector<LateUse> uses;              // since the last report: what was late and has been taken in
    std::vector<float> stand_ins;           // by shard: share of the own gradient where its mean did not come
    std::uint64_t mean_hash = 0;            // of the result in the own shard

    // When SCATTER of the own shard closed.
    Time closed_at() const { return entered_at + scatter.ended.value_or(0); }

    template <typename Visit>
    static constexpr void visit_fields(Visit&& visit) {
        visit("ticket", &OpReport::ticket);
        visit("status", &OpReport::status);
        visit("seq", &OpReport::seq);
        visit("behind_ops", &OpReport::behind_ops);
        visit("bucket_len", &OpReport::bucket_len);
        visit("own_shard", &OpReport::own_shard);
        visit("epoch", &OpReport::epoch);
        visit("heard_epoch", &OpReport::heard_epoch);
        visit("place", &OpReport::place);
        visit("non_finite", &OpReport::non_finite);
        visit("contributed", &OpReport::contributed);
        visit("carried", &OpReport::carried);
        visit("coding_carried", &OpReport::coding_carried);
        visit("entered_at", &OpReport::entered_at);
        visit("ended_at", &OpReport::ended_at);
        visit("scatter", &OpReport::scatter);
        visit("gather", &OpReport::gather);
        visit("links", &OpReport::links);
        visit("traffic", &OpReport::traffic);
        visit("energies", &OpReport::energies);
        visit("lr_scale", &OpReport::lr_scale);
        visit("late", &OpReport::late);
        visit("carried_coords", &OpReport::carried_coords);
        visit("late_coords", &OpReport::late_coords);
        visit("split_verdicts", &OpReport::split_verdicts);
        visit("column", &OpReport::column);
        visit("stated_lengths", &OpReport::stated_lengths);
    }
};

}  // namespace tailcut
