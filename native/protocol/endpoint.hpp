// A group in which every rank talks to every other: all ops of one rank. It checks everything that comes from the network
// (rule 11).
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <queue>
#include <span>
#include <utility>
#include <vector>

#include "protocol/ballot.hpp"
#include "protocol/core.hpp"
#include "protocol/group_path.hpp"
#include "protocol/memory.hpp"
#include "protocol/op.hpp"
#include "protocol/peer.hpp"
#include "protocol/report.hpp"
#include "protocol/shares.hpp"
#include "protocol/types.hpp"
#include "wire/header.hpp"

namespace tailcut {

// Is told when SCATTER of an op's own shard has closed, and when it would have without all contributions.
class CloseListener {
public:
    virtual ~CloseListener() = default;
    virtual void on_close(Op& op, Time due) = 0;
};

class Endpoint final : public Core {
public:
    Endpoint(const Settings& settings, const std::vector<PeerSettings>& peers)
        : Endpoint(settings, peers, make_values(settings.codec, settings.elided)) {}
    Endpoint(const Settings& settings, const std::vector<PeerSettings>& peers, std::unique_ptr<Values> values,
             CloseListener* listener = nullptr);

    void submit(Time now, Ticket ticket, std::span<float> bucket, const Terms& terms) override;
    void resynced() override { contributing_ = true; }
    void say_goodbye() override;
    void abort(Time now) override;
    void leave() override;
    bool drained() const override;

    void receive(Time now, std::span<const std::byte> datagram) override;
    bool transmit(Time now, Outgoing& out) override;
    void retract(Time now, const Outgoing& out) override;
    Time next_timer() const override;
    void advance(Time now) override;

    std::vector<OpReport>& reports() override { return reports_; }
    Counters counters() const override { return counters_; }
    std::size_t pool_used_bytes() const override { return memory_.pool_used_bytes(); }
    std::size_t memory_bytes() const override { return memory_.total_bytes(); }
    Duration rtt(Rank rank) const override { return peers_[rank].path.rtt(); }
    bool contributing() const override { return contributing_; }
    std::size_t in_flight() const override { return in_flight_; }

    // For who drives several endpoints. An op that is still to close its own shard; closing it now; and one of which others
    // have closed it before this rank has entered.
    bool will_close(Seq seq) const;
    void close(Time now, Seq seq);
    bool overtaken(Seq seq) const;
    // The reduction of this op, which is shared beyond the group, is given what it waits for by `put`, if it still waits.
    void reduce(Time now, Seq seq, std::uint32_t bucket_len, bool non_finite,
                const std::function<void(Reduction&)>& put);
    void expect(const Terms& terms) { terms_ = terms; }  // of ops that this rank has not entered
    void skip_to(Seq seq);                               // the ops before will not be entered
    std::uint64_t group_tag() const { return settings_.group_tag; }
    Rank ranks() const { return settings_.shape.ranks; }
    Seq next_seq() const { return next_seq_; }

private:
    struct Slot {
        Ballot ballot;
        std::vector<std::unique_ptr<Op>> variants;  // one for each length stated
        std::vector<std::uint32_t> forgotten;       // lengths whose mean was served and dropped: now late
    };
    using Slots = std::map<Seq, Slot>;

    // ---- multicast.cpp
    Rank everybody() const { return settings_.shape.ranks; }  // as a destination
    bool next_multicast(Time now, Outgoing& out);
    bool may_multicast(Time now, Op& op);
    bool most_have_room_for(Op& op);
    void retract_multicast(Time now, const Outgoing& out);
    void settle_multicast(Time now, const wire::Header& header, std::span<const std::byte> missing);
    void ask_members(Time now);
    void serve_apart(Time now, std::size_t member, Seq ops);
    void serve_together(Time now);
    void take_lost(Peer& peer);
    bool& is_ready(Rank rank) { return rank == everybody() ? group_path_.ready : peers_[rank].ready; }
    Time& wake_at(Rank rank) { return rank == everybody() ? group_path_.wake_at : peers_[rank].wake_at; }

    void reject(wire::Reject reason) { ++counters_.rejected[static_cast<std::size_t>(reason)]; }
    void on_feedback(Time now, const wire::Header& header, std::span<const std::byte> missing);
    void on_goodbye(Time now, const wire::Header& header, std::span<const std::byte> missing);
    double mean_rate() const;
    Duration median_rtt() const;
    void settle_path(Time now, const wire::Header& header, std::span<const std::byte> missing);
    void on_data(Time now, const wire::Header& header, std::span<const std::byte> payload);
    std::optional<wire::Reject> deliver(Time now, Slot& slot, Op& op, const wire::Header& header,
                                        std::span<const std::byte> payload);
    std::optional<wire::Reject> check_shape(const wire::Header& header, std::size_t payload_bytes) const;

    Slot& slot_of(Seq seq);
    Op* variant(Seq seq, Slot& slot, std::uint32_t bucket_len, bool own_length);
    template <typename Predicate>
    void forget(Slot& slot, Predicate over);
    bool awaited(Seq seq, const Op& op) const;
    bool owes_late(const Op& op) const;
    bool takes_late(Rank rank) const { return !closing_ && !peers_[rank].gone && !context_.silent[rank]; }
    void own(Time now, Slot& slot, Op& op, Block memory);
    Block room(std::size_t floats, wire::Stage stage, const Op& wanting, Time now);
    void cast_vote(Time now, Slot& slot, Rank rank, std::uint32_t bucket_len);
    void settle(Time now, Slot& slot, Op& op);
    void tell_closed(Op& op);
    void finish(Time now, Slot& slot, Op& op, Status status, Ending ending);
    void note_presence(const OpReport& report);
    void note_cuts(OpReport& report, const Op& op);
    void note_late(Time now, const wire::Header& header, std::size_t payload_bytes);
    void note_entered(Time now, Rank rank, Seq entered);
    Seq group_seq() const;
    Seq behind_ops() const;
    void jump(Time now);
    void retire();
    bool retired(Seq seq, const Op& op) const;
    Bounds bounds_of(const Op& op) const;

    bool next_for(Time now, Rank rank, Outgoing& out);
    bool next_data(Time now, Rank rank, Outgoing& out);
    bool next_late(Time now, Rank rank, Outgoing& out);
    bool has_leisure() const;
    void dispatch(Time now, Rank rank, Op& op, Outgoing& out);
    bool may_send(Time now, Rank rank, const Op& op);
    bool has_turn(Rank rank, const Op& op) const;
    void pass_turn(Rank rank, const Op& op);
    bool next_of(Time now, Rank rank, Op& op, Outgoing& out);
    bool next_lost(Time now, Rank rank, Op& op, wire::Stage stage, Outgoing& out);
    void ask_later(Time now, Peer& peer);
    bool has_room_for(const Peer& peer, Seq seq) const;
    void say(Time now, Rank rank, wire::Type type, bool reply_wanted, Outgoing& out, bool multicast = false);
    void mark_ready(Rank rank);
    void mark_all_ready();

    const Settings settings_;
    Memory memory_;  // before the ops, whose blocks return to it
    const std::unique_ptr<Values> values_;
    CloseListener* const listener_;  // or null
    OpContext context_;
    std::vector<Peer> peers_;
    GroupPath group_path_;  // without members: idle for ever
    Shares shares_;
    Slots slots_;
    std::vector<std::uint64_t> recent_bytes_;  // by seq modulo its size: bucket bytes of recent ops
    Terms terms_;                              // of the latest op,
    std::uint32_t terms_len_ = 0xFFFFFFFF;     // and the length of its bucket
    LrScale lr_scale_;                         // the latest that anybody has told
    Seq next_seq_;
    std::size_t in_flight_ = 0;  // ops entered and not ended
    bool contributing_ = true, closing_ = false;
    Seq goodbye_seq_ = 0;  // the first op that we neither enter nor serve
    std::deque<Rank> ready_;
    std::size_t burst_bytes_ = 0;  // sent in a row to the peer at the front of ready_
    bool turn_awaited_ = false;    // somebody is not sent to because others come first
    int limiting_peers_ = 0;       // that want to hear few senders at once
    Time next_probe_ = kNever;     // no probe is due before
    // Peers that the pace holds back, soonest first; an entry is void if the peer has another wake_at.
    using Wake = std::pair<Time, Rank>;
    std::priority_queue<Wake, std::vector<Wake>, std::greater<>> wakes_;
    struct Cut {
        Seq seq;
        wire::Stage stage;
        std::uint32_t bucket_len;
        Time from;
        std::int64_t missing;  // coordinates
        // By rank from which some were missing, unless it was silent: what has come.
        std::vector<std::pair<Rank, GranuleSet>> came;
        std::uint32_t late_coords = 0;  // that have come with a mean since
    };
    std::deque<Cut> cuts_;  // stages that ended without all, latest last
    std::vector<LateCompletion> late_;
    std::vector<OpReport> reports_;
    Counters counters_;
};

}  // namespace tailcut
