// The ops of one rank as a ledger has them: contributions and means come as blobs, and what came of them in time, late or
// never is told, where an endpoint hears it from the network and the clock. The arithmetic is that of every op
// (docs/ledger.md). A caller takes an op through: late parts, begin, enter, deliver, close, place, late means, end.
// Means of the own shard may be taken in parts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "protocol/carry/carry.hpp"
#include "protocol/ops/attendance.hpp"
#include "protocol/ops/op.hpp"
#include "protocol/values/values.hpp"

namespace tailcut {

class ReplayCore final : LateAdmission {
public:
    using Runs = std::vector<std::pair<std::uint32_t, std::uint32_t>>;  // granules [first, last)
    using Cuts = std::map<std::uint32_t, std::uint32_t>;  // by first granule of a packet: the bytes that came
    using Bytes = std::vector<std::byte>;                 // datagrams, each behind its length

    // `limits` by rank, as they were; `late_ops`: how long late parts are kept.
    ReplayCore(const Shape& shape, wire::Codec codec, std::vector<codec::PacketLimits> limits, bool carry,
               Seq late_ops);

    void install(Epoch epoch) { epochs_.add(std::move(epoch)); }
    void skipped(Seq from, Seq until) { carry_.skip(from, until); }
    void resynced() { carry_.drop_all(); }

    // What was late for ops, and is taken in by those that admit() names.
    void take_late(std::span<const std::byte> contribution, const Runs& runs, const Cuts& cuts);
    // Of the contribution of `rank` to op `seq`, op `user` takes these granules in, and no others.
    void admit(Seq user, Seq seq, Rank rank, bool subtracted, const Runs& runs);
    void take_late_means(std::span<const std::byte> mean, const Runs& runs);

    void begin(Seq seq, std::uint32_t length, const Terms& terms);
    // These granules of the own shard close with what was delivered. If the rank has not entered, its own contribution
    // is late for them.
    void close_part(Seq seq, const Runs& runs);
    void enter(Seq seq, std::span<float> bucket, bool contributing, std::span<float> residue);
    Bytes contribution(Seq seq, Rank peer);
    void deliver(Seq seq, std::span<const std::byte> contribution, const Runs& runs, const Cuts& cuts);
    void close(Seq seq);
    Bytes mean(Seq seq, Rank peer);
    void place(Seq seq, std::span<const std::byte> mean, const Runs& runs, const Cuts& cuts);
    void place_empty(Seq seq, Rank shard, const Runs& runs);
    // `shares` by shard: of the own gradient, where a mean did not come.
    OpReport end(Seq seq, Status status, std::vector<float> shares);
    // The op had no result for this rank: it has not entered it, or has not ended it. What is late for it stays.
    void drop(Seq seq);

private:
    using Late = std::tuple<Seq, Seq, Rank, bool>;  // user, seq, rank, subtracted
    void keep_admitted(Seq user, Seq seq, Rank rank, bool subtracted, GranuleSet& due) const override;
    Op& op(Seq seq) { return *ops_.at(seq); }
    Plan late_plan(const wire::Header& header) const;

    Memory memory_;
    Epochs epochs_;
    Roster roster_;
    Attendance attendance_;
    Audience audience_;
    Counters counters_;
    const std::unique_ptr<Values> values_;
    Carry carry_;
    Scratch scratch_;
    const OpContext context_;
    std::map<Seq, std::unique_ptr<Op>> ops_;
    std::map<Seq, Terms> terms_;
    std::map<Late, Runs> admitted_;
};

}  // namespace tailcut
