// All ops of one rank. Sans-IO: it is told the time and handed datagrams, and gives back datagrams, its next
// timer and the reports of ended ops. It checks everything that comes from the network (rule 11).
#pragma once

#include <array>
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
#include "protocol/group_path.hpp"
#include "protocol/memory.hpp"
#include "protocol/op.hpp"
#include "protocol/peer.hpp"
#include "protocol/report.hpp"
#include "protocol/shares.hpp"
#include "protocol/types.hpp"
#include "wire/header.hpp"

namespace tailcut {

// Who hears our multicast, and the path to all of them. Without members there is none.
struct MulticastSettings {
    std::vector<Rank> members;
    PeerSettings path;  // with the least of what the members grant; pool_bytes is not looked at
};

struct Settings {
    Shape shape;
    std::uint64_t group_tag = 0;
    Seq window_ops = 64;                    // W of rule 3
    wire::Codec codec = wire::Codec::kRaw;  // of all ranks
    std::size_t pool_bytes = 0;
    std::uint32_t window_bytes = 0;  // each sender's share of our socket buffer
    Terms terms;                     // of ops that this rank has not entered
    MulticastSettings multicast;
    Seq first_seq = 0;
    bool resend = true;  // what was lost, while its stage is open
    bool record_fates = false;
    Rank rows = 1;               // of a grid (grid.hpp); 1: a flat group
    Level level = Level::kFlat;  // the grid sets it
    bool elided = false;         // simulations only: packets without values
};

struct Counters {
    Traffic traffic;  // of all packets, not of DATA alone
    std::uint64_t feedback_packets = 0, feedback_bytes = 0, probe_packets = 0;
    std::uint64_t lost_packets = 0;    // DATA found lost
    std::uint64_t evicted_shards = 0;  // owned shards given up because the pool was full
    std::uint64_t evicted_means = 0;   // means given up before every peer had them
    std::array<std::uint64_t, wire::kRejectReasons> rejected{};

    template <typename Visit>
    static constexpr void visit_fields(Visit&& visit) {
        visit("traffic", &Counters::traffic);
        visit("feedback_packets", &Counters::feedback_packets);
        visit("feedback_bytes", &Counters::feedback_bytes);
        visit("probe_packets", &Counters::probe_packets);
        visit("lost_packets", &Counters::lost_packets);
        visit("evicted_shards", &Counters::evicted_shards);
        visit("evicted_means", &Counters::evicted_means);
        visit("rejected", &Counters::rejected);
    }
};
static_assert(listed_bytes<Counters>() == sizeof(Counters));

class Endpoint {
public:
    // `peers` by rank; the own entry is not used.
    Endpoint(const Settings& settings, const std::vector<PeerSettings>& peers);

    // The local rank enters its next op. The bucket must stay valid until the report of `ticket`, and so must, in a column,
    // the weights.
    void submit(Time now, Ticket ticket, std::span<float> bucket, const Terms& terms,
                std::span<const float> weights = {});
    void resynced() { contributing_ = true; }  // the state was copied from a peer: contribute again
    void say_goodbye();                        // enter no more ops, go on serving
    void abort(Time now);                      // end the ops in flight with what has arrived
    void leave();                              // the last word: what is not sent by now will not be
    bool drained() const;                      // nothing left to serve, and every peer has said goodbye

    void receive(Time now, std::span<const std::byte> datagram);
    bool transmit(Time now, Outgoing& out);
    void retract(Time now, const Outgoing& out);  // not sent after all, the host is busy; newest first
    Time next_timer() const;
    void advance(Time now);

    // In a row of a grid: what the column is to average (the grid takes it), and its answer: the means of the granules that are
    // `held`. An op whose sums have not been taken will hand some on, unless this rank has jumped past it.
    std::vector<Sums>& sums() { return sums_; }
    bool will_sum(Seq seq) const;
    void close_scatter(Time now, Seq seq);  // what has not come yet is of no use to the column any more
    void conclude(Time now, Seq seq, std::uint32_t bucket_len, std::span<const float> means,
                  const GranuleSet& held, std::span<const std::uint8_t> planes, bool non_finite);
    // In a column: terms of ops that this rank has not entered, and that the ops before one will not be entered.
    void expect(const Terms& terms) { terms_ = terms; }
    bool overtaken(Seq seq) const;  // this rank's part of an op that it has not entered is closed
    void skip_to(Seq seq);

    std::vector<OpReport>& reports() { return reports_; }  // of ended ops; the driver takes them
    const Counters& counters() const { return counters_; }
    const Memory& memory() const { return memory_; }
    const Peer& peer(Rank rank) const { return peers_[rank]; }
    std::uint64_t group_tag() const { return settings_.group_tag; }
    Rank ranks() const { return settings_.shape.ranks; }
    Seq next_seq() const { return next_seq_; }
    bool contributing() const { return contributing_; }
    std::size_t in_flight() const { return in_flight_; }

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
    void take_sums(Op& op);
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
    std::size_t in_flight_ = 0;  // ops entered and not finished
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
    std::vector<Sums> sums_;
    std::vector<OpReport> reports_;
    Counters counters_;
};

}  // namespace tailcut
