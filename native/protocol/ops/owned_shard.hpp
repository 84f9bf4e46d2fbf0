// What a shard's owner does in one op: it knows what each rank contributed, decides when SCATTER closes and
// granules are reduced, and knows which runs of the mean each peer has been sent. It never waits for its own
// gradient.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "protocol/ops/stage_clocks.hpp"
#include "protocol/reports/report.hpp"
#include "protocol/values/values.hpp"

namespace tailcut {

class OwnedShard {
public:
    OwnedShard(const OpContext& context, const Plan& plan, std::unique_ptr<Reduction> values);

    // `bucket_shard` holds the own contribution, if there is one, and receives the mean in its place. The
    // memory no longer counts as the pool's.
    void enter(Time now, float* bucket_shard, bool contributing, const Coding& gather);
    // These granules are closed by the clock only if those that lack them are not awaited, or short of the deadline.
    void set_reliable(const GranuleSet& granules);
    void set_loss_scale_tag(std::uint16_t tag) { values_->loss_scale_tag = tag; }
    std::uint16_t loss_scale_tag() const { return values_->loss_scale_tag; }
    // The caller takes its shard back. What a peer has not been sent yet, or may need again, is saved.
    void hand_back(bool awaited);
    // The rank will deliver nothing more. Its missing granules are no longer waited for.
    void abstain(Rank rank, Time now);
    // What the rank has not delivered is not waited for any more. It is late from now on.
    void decide(Rank rank, Time now);
    // The rank will deliver nothing more in time, and will not apply the mean in time. If it has ended the op, the
    // rest of the mean is late for it and must not delay ops that are alive.
    void peer_ended(Rank rank, Time now);
    void peer_left(Rank rank, Time now);
    std::optional<wire::Reject> contribute(const wire::Header& header, std::uint32_t first,
                                           std::uint32_t last, std::span<const std::byte> payload, Time now);
    void note_entry(Rank rank, Time entered_at) { clock_.note_entry(rank, entered_at); }

    // When cut() is due, and then close() for what it has left open.
    StageEnd close_at(const Bounds& bounds) const;
    // Closes by the clock, except what awaits_reliable() is about.
    void cut(Time now, Ending ending, float skip_above);
    // Reduces what has arrived. If so much is missing that the mean would err by more than `skip_above` of
    // its energy, what is not final becomes EMPTY instead.
    void close(Time now, Ending ending, float skip_above = 0);
    void close(Time now, std::uint32_t first, std::uint32_t last);  // only these granules
    // Whether a rank that is awaited has still to deliver a reliable granule.
    bool awaits_reliable() const;

    // SCATTER takes no more contributions.
    bool closed() const { return complete_granules_ == granules_; }
    // By rank: whether its contribution had come at the close, as far as it was not lost.
    std::vector<bool> came() const;
    bool awaited(Rank rank) const { return awaited_[rank]; }
    Time closed_at() const { return closed_at_; }
    // When it has closed, apart from reliable granules.
    Time ended_at() const { return cut_at_ < 0 ? closed_at_ : cut_at_; }
    // Every granule of the mean is final. This holds as soon as the shard is closed, unless the mean is
    // shared beyond the group. Then reduce_more() takes in what has become final since, and leave_rest_empty() makes
    // the rest EMPTY.
    bool reduced() const { return final_granules_ == granules_; }
    void reduce_more();
    void leave_rest_empty();
    Reduction& values() { return *values_; }
    Ending ending() const { return ending_; }
    const ScatterClock& clock() const { return clock_; }
    std::uint32_t final_granules() const { return final_granules_; }
    const GranuleSet& final_set() const { return final_; }
    bool non_finite() const { return non_finite_; }
    const Energies& energies() const { return values_->energies(); }
    bool abstained(Rank rank) const { return abstains_[rank]; }
    const GranuleSet& arrived(Rank rank) const { return arrived_[rank]; }  // those that are in the mean
    const GranuleSet& delivered(Rank rank) const {
        return delivered_.empty() ? arrived_[rank] : delivered_[rank];
    }
    std::span<const Run> runs() const { return runs_; }

    // Sending. All peers that multicast covers share one cursor. pending() is the next run to send, or what
    // is left of it.
    std::optional<Run> pending(Destination to) const;
    // Rule 9: the same for a peer that has ended the op.
    std::optional<Run> late(Rank peer) const { return ended_[peer] ? unsent(peer) : std::nullopt; }
    RunCursor cursor(Destination to) const { return cursors_[to.place(shape_.ranks)]; }
    std::uint32_t packet(Destination to, const Run& run, Outgoing& out) const {
        return values_->packet(to, run, out);
    }
    void advance(Destination to, std::uint32_t granules);
    void rewind(Destination to, RunCursor cursor) { cursors_[to.place(shape_.ranks)] = cursor; }
    bool has_ended(Rank peer) const { return ended_[peer]; }
    bool sent_all(Destination to) const { return reduced() && !unsent(to); }
    bool served(Destination to) const {
        return reduced() && !pending(covers(to) ? Destination::everybody() : to);
    }
    const Audience::Set& covered() const { return covered_; }  // those that have not ended the op
    // The peer is served by unicast from here on.
    void serve_apart(Rank peer);

    // Once reduced: keeps only the mean, in `smaller`.
    std::size_t compact_floats() const { return values_->mean_floats(); }
    void compact(Block smaller) { values_->compact(std::move(smaller)); }
    bool compacted() const { return values_->compacted(); }
    bool pooled() const { return values_->pooled(); }

private:
    // When ranks are left out that have not entered.
    Time absent_left_at(const Bounds& bounds) const;
    bool awaits(Rank rank) const { return !decided_by_[rank] && !context_.roster.silent(rank); }
    GranuleSet held() const;
    void close_but(const GranuleSet& held, Time now, Ending ending, float skip_above);
    double lacking(const GranuleSet& held) const;
    bool alone() const;
    bool stale() const;
    void drop_arrived();
    void put_off_alone();
    void reduce_decided(Time now);
    void lose(Rank rank, Time now);
    void reduce_complete(std::uint32_t first, std::uint32_t last, Time now);
    void take_fresh();
    void note_non_finite();
    void append(Run run);
    std::optional<Run> unsent(Destination to) const;
    bool covers(Destination to) const {
        const int index = to.is_everybody() ? -1 : context_.audience.index(to.rank());
        return index >= 0 && covered_[static_cast<std::size_t>(index)];
    }

    const OpContext& context_;
    const Shape& shape_;
    const Plan plan_;
    const std::uint32_t granules_;
    std::unique_ptr<Reduction> values_;

    std::vector<GranuleSet> arrived_;     // by rank: granules with a value
    std::vector<GranuleSet> delivered_;   // by rank: arrived_ before the op was skipped; empty if it was not
    std::vector<std::uint16_t> decided_;  // by granule: ranks that delivered it or never will
    GranuleSet complete_;                 // granules decided by all ranks, which are in reduction or final
    GranuleSet final_;                    // granules whose mean is computed
    GranuleSet reliable_;                 // granules that the clock does not close
    const std::vector<bool> awaited_;     // by rank, when the op began
    std::vector<bool> ended_, left_;      // by rank
    std::vector<bool> last_came_;         // by rank: the end of its contribution has come
    std::vector<bool> abstains_;          // by rank: it contributes nothing more, now or later
    std::vector<bool> decided_by_;        // by rank: what it has not delivered is not waited for
    ScatterClock clock_;
    std::uint32_t complete_granules_ = 0, final_granules_ = 0;
    Time closed_at_ = 0, cut_at_ = -1;  // -1: nothing was left open when the clock ended SCATTER
    Ending ending_ = Ending::kAll;
    bool non_finite_ = false;

    std::vector<Run> runs_;
    Audience::Set covered_;           // served by multicast
    std::vector<RunCursor> cursors_;  // by peer, then that of multicast
    std::vector<Run> fresh_;          // scratch: runs that have become final
};

}  // namespace tailcut
