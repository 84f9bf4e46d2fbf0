// What a driver drives: all ops of one rank. It does no I/O: it is told the time and handed datagrams, and
// gives back datagrams, its next timer and the reports of ended ops.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "protocol/ops/epochs.hpp"
#include "protocol/ops/terms.hpp"
#include "protocol/reports/counters.hpp"
#include "protocol/reports/report.hpp"
#include "protocol/sending/outgoing.hpp"
#include "protocol/settings.hpp"

namespace tailcut {

class StateChannel;

class Core {
public:
    virtual ~Core() = default;

    // The local rank enters its next op. The bucket must stay valid until the report of `ticket`.
    virtual void submit(Time now, Ticket ticket, std::span<float> bucket, const Terms& terms) = 0;
    // Between ops, what the local rank has done with the results. It decides what is carried (rules 9 and 10).
    virtual void
    resynced() = 0;  // all replicas were made equal: it contributes again, and nothing is pending
    // A rank that was behind copies the state of a step: its next op is the first one of that step, and once it has
    // the state it contributes again. Only a rank that can fetch STATE does so.
    virtual void skip_to(Seq) {}
    virtual void rejoined() {}
    virtual void skipped(Seq from, Seq until) = 0;  // nobody has applied the results of these ops
    // These coordinates of a bucket are copied from their owner: nothing that is late is added to them.
    virtual void forget(std::uint32_t key, std::uint64_t first, std::uint64_t last) = 0;
    // All owners have agreed on this epoch. One that is not later than the latest changes nothing.
    virtual void install(Time now, Epoch epoch) = 0;
    // Whether the local rank will enter no op for a while: then nobody waits for it. To enter one is to be back.
    virtual void set_away(bool away) = 0;
    virtual void say_goodbye() = 0;    // enter no more ops, go on serving
    virtual void abort(Time now) = 0;  // end the ops in flight with what has arrived
    virtual void leave() = 0;          // the last word: what has not been sent by now never will be
    virtual bool drained() const = 0;  // nothing left to serve, and every peer has said goodbye

    virtual void receive(Time now, std::span<const std::byte> datagram) = 0;
    // The rank that a datagram claims to come from; none if the datagram is not for this core.
    virtual std::optional<Rank> claimed_source(std::span<const std::byte> datagram) const = 0;
    virtual bool transmit(Time now, Outgoing& out) = 0;
    // The packet was not sent after all because the host is busy. Called for the newest packet first.
    virtual void retract(Time now, const Outgoing& out) = 0;
    virtual Time next_timer() const = 0;
    virtual void advance(Time now) = 0;

    virtual StateChannel* state() { return nullptr; }  // none: blobs are neither offered nor fetched
    virtual std::vector<OpReport>& reports() = 0;      // of ended ops; the driver takes them
    // With a ledger. What this rank has done in ops that have not ended here, as far as it has changed since the last
    // call: asked before a batch is sent, so that no decision is known to others only.
    virtual std::vector<OpReport> take_open() { return {}; }
    // What it has done as an owner in ops that it will not enter.
    virtual std::vector<OpReport> take_served() { return {}; }
    virtual Counters counters() const = 0;
    virtual std::size_t pool_used_bytes() const = 0;
    virtual std::size_t memory_bytes() const = 0;
    virtual Duration rtt(Rank rank) const = 0;  // 0: not known
    virtual bool contributing() const = 0;
    virtual std::size_t in_flight() const = 0;
    virtual Seq next_seq() const = 0;   // of the local rank's next op
    virtual Seq group_seq() const = 0;  // how many ops at least half of the other ranks present have entered
    virtual std::uint16_t heard_epoch() const = 0;  // the latest that anybody has spoken of
};

// `peers` is indexed by rank; the own entry is not used.
std::unique_ptr<Core> make_core(const Settings& settings, const std::vector<PeerSettings>& peers);
// The group tags of datagrams that come to a rank.
std::vector<std::uint64_t> tags_to(std::uint64_t group_tag, Rank rank, Rank ranks, Rank rows);
// The number of ranks that send to one rank, itself included: they share what it can take.
Rank senders_to_one(Rank ranks, Rank rows);

}  // namespace tailcut
