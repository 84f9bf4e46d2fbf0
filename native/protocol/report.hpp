// What one op tells its caller: plain values, complete when the op ends. Ranks are those of the endpoint's group.
#pragma once

#include <cstdint>
#include <vector>

#include "protocol/energies.hpp"
#include "protocol/granules.hpp"
#include "protocol/types.hpp"
#include "wire/header.hpp"

namespace tailcut {

enum class Status : std::uint8_t {
    kComplete,        // every granule of the mean was answered
    kDeadline,        // the deadline ended it: what is missing is zero and named below
    kBehind,          // more than the window behind the group: nothing was reduced, seq has jumped
    kLengthMismatch,  // the ranks do not agree on the bucket's length, and this rank is not the majority
    kClosed,          // the group was closed under it
    kSeqExhausted,    // seq would wrap
    kFailed,          // the engine could not go on
};

// What ended a stage.
enum class Ending : std::uint8_t {
    kAll,       // everything had come
    kGrace,     // the last parts had come, and the grace was over
    kBound,     // its t_B
    kDeadline,  // that of the op, or the caller
};

// A stage of an earlier op that had been cut: what it lacked has meanwhile come.
struct LateCompletion {
    Seq seq;
    wire::Stage stage;
    std::uint32_t bucket_len;
    Duration took;
};

struct OpReport {
    Ticket ticket = 0;
    Status status = Status::kComplete;
    Seq seq = 0;
    Seq behind_ops = 0;
    std::uint32_t bucket_len = 0;
    Rank own_shard = 0;
    Rank place = 0;  // of this rank in what is by rank below: in a grid, that is the row
    bool non_finite = false;
    bool contributed = true;
    int planes = 0, gather_planes = 0;  // bits a coordinate of its contribution and of its mean; 0: raw
    Energies energies;
    Time entered_at = 0;
    Time majority_entered_at = -1;  // when the ceil(N/2)-th rank entered; here and below -1: not known
    Time scatter_closed_at = 0;     // when this rank closed SCATTER of its own shard
    Time finished_at = 0;
    Ending scatter_ending = Ending::kAll, gather_ending = Ending::kAll;

    // by rank
    std::vector<Time> peer_entered_at;
    std::vector<Time> scatter_last_at;  // the latest packet of its contribution
    std::vector<Time> gather_last_at;   // the latest packet of its mean
    std::vector<bool> silent;           // not waited for
    // DATA sent to it since the last report, and found lost
    std::vector<std::uint32_t> sent_to_packets, sent_lost_packets;
    // DATA that came from it since the last report, and that is missing in between
    std::vector<std::uint32_t> received_from_packets, received_lost_packets;
    std::vector<LateCompletion> late;
    std::uint32_t late_coords = 0;  // of the op before: means that came after its end, and before this one's
    std::vector<OpReport> column;   // in a grid: ops of the column that have ended since the last report

    std::vector<std::uint32_t> shard_lengths;  // by owner: the coordinates of its shard in this op

    // SCATTER, at this rank as owner: coordinates of its shard that each rank's contribution lacked.
    std::vector<std::uint32_t> scatter_missing;
    std::vector<Rank> abstained;  // ranks that said they contribute nothing
    // GATHER, at this rank as receiver: coordinates of each owner's shard that did not come, or came EMPTY.
    std::vector<std::uint32_t> gather_missing;
    std::vector<std::uint32_t> gather_empty;
    std::vector<std::uint32_t> peer_lengths;  // kLengthMismatch: the length each rank stated, own included
    std::vector<bool> peer_voted;

    std::uint64_t sent_packets = 0, sent_bytes = 0;
    std::uint64_t received_packets = 0, received_bytes = 0;
    std::uint64_t trimmed_packets = 0, resent_packets = 0;
    std::uint64_t multicast_packets = 0;  // sent once for many

    std::vector<std::uint8_t>
        mean_planes;   // in a column, by shard: with which rows send its mean on; 0: not known
    LrScale lr_scale;  // the latest that was heard of

    // With Settings::record_fates: which granules arrived.
    std::vector<GranuleSet> contributions;  // by rank, over the own shard
    std::vector<GranuleSet> held;           // by shard, with a mean
};

}  // namespace tailcut
