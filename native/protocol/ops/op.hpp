// One AllReduce at one rank: contributions going out, the owned shard, means coming in, and the report. It is
// told the time, handed parsed packets and asked for packets to send. It has no clock, no socket and no
// thread.
#pragma once

#include <cstddef>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "protocol/ops/layout.hpp"
#include "protocol/ops/owned_shard.hpp"
#include "protocol/ops/ownership.hpp"
#include "protocol/ops/received_means.hpp"
#include "protocol/ops/reliable.hpp"
#include "protocol/ops/terms.hpp"
#include "protocol/reports/report.hpp"
#include "wire/header.hpp"

namespace tailcut {

class Op {
public:
    // `gather` is the mean's coding until the local rank enters.
    Op(const OpContext& context, const Plan& plan, const Coding& gather);

    Seq seq() const { return plan_.seq; }
    BucketId bucket() const { return plan_.bucket; }
    const Layout& layout() const { return plan_.layout; }
    Rank own_shard() const { return plan_.own_shard(); }
    bool entered() const { return entered_; }
    bool ended() const { return ended_; }
    bool owns() const { return owned_.has_value(); }
    bool holds() const { return means_.has_value(); }

    // Memory is handed in when it is first needed. Before the op is entered, it comes from the pool.
    std::size_t own_floats() const { return owned_floats(context_.codec, plan_.layout); }
    void own(Block memory);  // own_floats(); with an empty block the shard can only become EMPTY
    void set_loss_scale_tag(std::uint16_t tag) { owned_->set_loss_scale_tag(tag); }  // before the entry
    void hold(Block memory) {                                                        // bucket_len floats
        means_.emplace(context_, plan_, std::move(memory));
    }

    // The local rank will not enter: what was kept for it goes.
    void drop_means() { means_.reset(); }

    // What is waited for beyond the bounds: before the entry as far as is known, then as its terms say.
    void set_reliable(std::span<const CoordRun> runs);
    // The local rank enters. Needs own(). What has already arrived goes into the bucket.
    void enter(Time now, Ticket ticket, std::span<float> bucket, const Terms& terms, bool contributing);

    // Packets that passed the endpoint's checks. scatter() needs own(), gather() needs hold() or an entry.
    std::optional<wire::Reject> scatter(Time now, const wire::Header& header,
                                        std::span<const std::byte> payload, Time source_entered_at);
    std::optional<wire::Reject> gather(Time now, const wire::Header& header,
                                       std::span<const std::byte> payload);
    void abstain(Rank rank, Time now);    // the rank will contribute nothing more
    void peer_left(Rank rank, Time now);  // the same, and it will not apply the mean of the own shard
    // After the entry: the owner will send nothing more, and what is missing of its mean counts as EMPTY.
    void owner_left(Rank owner) { means_->owner_left(owner, entered_at_); }
    // Before the entry: gives up the owned shard's memory, so that all of its mean is EMPTY.
    void evict(Time now);

    // The granules that have come from a rank, of its contribution or of its mean.
    const GranuleSet& came(wire::Stage stage, Rank from) const {
        return stage == wire::Stage::kScatter ? owned_->delivered(from)
                                              : means_->answered(plan_.shard_of(from));
    }

    std::uint32_t own_final() const { return owned_ ? owned_->final_granules() : 0; }
    bool complete() const {
        return entered_ && !ended_ && means_->answered_granules() + own_final() == total_granules_;
    }
    // All means have come except those of silent owners. They are waited for if nobody else is there either.
    bool gathered() const;
    // The ranks that have become silent are not waited for.
    void give_up_silent(Time now);
    // Tells once that SCATTER of the own shard has closed.
    bool take_closed() { return closed() && !std::exchange(close_told_, true); }
    std::vector<bool> came_by_close() const { return owned_->came(); }
    // `bounds` apply if the local rank has not entered the op.
    StageEnd close_at(const Bounds& bounds) const {
        return owned_ ? owned_->close_at(entered_ ? bounds_ : bounds) : StageEnd{};
    }
    // `skip_above` applies if the local rank has not entered the op.
    void close(Time now, Ending ending, float skip_above) {
        owned_->close(now, ending, entered_ ? skip_above_ : skip_above);
    }
    // Closes granules [first, last) of the own shard with what has arrived.
    void close(Time now, std::uint32_t first, std::uint32_t last) { owned_->close(now, first, last); }
    void cut(Time now, Ending ending, float skip_above) {
        owned_->cut(now, ending, entered_ ? skip_above_ : skip_above);
    }

    // SCATTER of the own shard takes no more contributions.
    bool closed() const { return owned_ && owned_->closed(); }
    // When SCATTER would have closed without all contributions; `bounds` as in close_at().
    Time close_due_at(const Bounds& bounds) const;
    // For a mean that is shared beyond the group: its reduction, some of which may have become final.
    Reduction& reduction() { return owned_->values(); }
    void reduce_more(bool non_finite);
    bool reduced() const { return !owned_ || owned_->reduced(); }
    // Rule 10: whether an owner has accepted a contribution with an Inf or a NaN, as far as was heard.
    bool non_finite() const { return verdict_ || (owned_ && owned_->non_finite()); }
    // When the clock ends the op for the local rank, and by which rule.
    StageEnd end_at() const;

    // Ends the op for the caller. The own shard must be closed. What did not come is filled in, and the bucket is
    // not touched afterwards. `awaited`: some of the own mean may have to be sent again. `stand_in`: what stands for means
    // that did not come, if it is not to be found from earlier ops.
    OpReport end(Time now, Status status, Ending ending, bool awaited, bool record_fates,
                 const StandIn* stand_in = nullptr);
    // For the ledger, before the end: what this rank has done so far as an owner, and its terms if it has entered.
    OpReport so_far() const;
    // Whether that has changed since the last call.
    bool take_progress() {
        return std::exchange(told_, {entered_, own_final()}) != std::pair(entered_, own_final());
    }
    // After the end: what may still come is kept elsewhere.
    ReceivedMeans take_means() {
        ReceivedMeans means = std::move(*means_);
        means_.reset();
        return means;
    }

    // After the end: what was not delivered of the contribution is not sent any more.
    void drop_late_contributions();

    // The next packet to send; contributions come before means.
    bool next_packet(Time now, Destination to, Outgoing& out);
    // Rule 9: the next packet that comes too late for this op: of a contribution that the owner has closed without, or
    // of the mean for a peer that has ended the op.
    bool next_late(Time now, Rank peer, Outgoing& out);
    bool owes_late(Rank peer) const { return late_steps_.contains(peer) || (owned_ && owned_->late(peer)); }
    // What is to be done with a lost packet.
    enum class Again { kNow, kLate, kNever };
    Again again(Rank peer, const Parcel& parcel) const;
    // Makes a lost packet again; false if it is of no use any more.
    bool repeat(Time now, Rank peer, const Parcel& parcel, Outgoing& out);
    // The peer has received a packet of our contribution.
    void note_delivered(Rank peer, const Parcel& parcel) {
        if (contributions_ && !parcel.empty)
            contributions_->note_delivered(plan_.shard_of(peer), parcel.first);
    }
    void retract(const Outgoing& out);
    bool pending(Destination to) const;
    bool owes(Rank peer) const { return unsent(peer); }  // some of our contribution to its shard
    // Nothing is left to be sent in time.
    bool served(Destination to) const { return (!owned_ || owned_->served(to)) && !unsent(to); }
    Audience::Set covered() const { return owned_ ? owned_->covered() : Audience::Set{}; }
    void serve_apart(Rank peer) {
        if (owned_) owned_->serve_apart(peer);
    }
    bool compacted() const { return !owned_ || owned_->compacted(); }
    // Of an op before the local rank's next one: whether its mean is kept only for peers that are behind.
    bool is_history() const { return (ended_ || (!entered_ && closed() && reduced())) && owned_->pooled(); }
    std::size_t compact_floats() const { return owned_->compact_floats(); }
    void compact(Block smaller) { owned_->compact(std::move(smaller)); }

    void count_received(std::size_t bytes) {
        ++report_.traffic.received_packets;
        report_.traffic.received_bytes += bytes;
    }
    void count_late() { ++report_.traffic.late_packets; }
    void count_sent(const Outgoing& out, int sign = 1) {
        report_.traffic.sent_packets += sign;
        report_.traffic.sent_bytes += sign * (wire::kHeaderBytes + out.payload.size());
        report_.traffic.resent_packets += sign * out.again;
        report_.traffic.multicast_packets += sign * out.header.multicast();
    }

private:
    struct Steps {
        std::uint32_t first, last;
    };
    // Whether what comes too late from this rank is still of use.
    bool carrying() const { return contributing_ && context_.carries(plan_); }
    bool unsent(Destination to) const {
        return !to.is_everybody() && (sent_[to.rank()] < steps_[to.rank()] || end_due_[to.rank()]);
    }
    bool contributes_to(Rank peer) const {
        return contributing_ && plan_.layout.length(plan_.shard_of(peer)) > 0;
    }
    bool next_mean(Destination to, const std::optional<Run>& run, Outgoing& out);
    bool next_contribution(Rank peer, Outgoing& out);
    std::uint32_t put_mean(Destination to, const Run& run, Outgoing& out);
    void take_in(std::span<float> residue);
    bool put_contribution(Rank peer, std::uint32_t& step, Outgoing& out);
    void put_end(Rank peer, Outgoing& out);
    void end_contributions(bool carried);
    void end_carrying();
    StandIn stand_in() const;
    void complete_header(Time now, Destination to, Outgoing& out) const;
    Time gathered_at() const;
    StageEnd clock_end() const;
    Time majority_at() const;
    bool served() const;
    bool awaits_reliable() const;
    void fill_report(Time now, Status status, Ending ending);
    void fill_links();
    SinceEntry since_entry(Time at) const { return at < 0 ? SinceEntry() : at - entered_at_; }
    void note_cut(const wire::Header& header, std::size_t payload_bytes, bool again);
    void record_fates(Status status);

    const OpContext& context_;
    const Shape& shape_;
    const Plan plan_;
    std::uint32_t total_granules_ = 0;
    std::vector<GranuleSet> reliable_;  // by shard; or empty

    // the local rank
    bool entered_ = false, contributing_ = false, ended_ = false;
    bool fetches_ = false;  // it abstains, and the others were there before: the means are history
    std::span<float> bucket_, residue_;
    Bounds bounds_;
    Coding scatter_, gather_;
    float skip_above_ = 0;
    std::uint16_t loss_scale_tag_ = 0;
    Time entered_at_ = 0, deadline_ = kNever;
    std::unique_ptr<Contributions> contributions_;
    // By peer: how many steps of the contribution to its shard were sent or have become late, and how many there are.
    std::vector<std::uint32_t> sent_, steps_;
    // By peer: to be sent late. Only peers that are owed something, because an empty deque takes half a kilobyte.
    std::map<Rank, std::deque<Steps>> late_steps_;
    std::vector<bool> end_due_;  // by peer: it is to be told that we have ended the op

    std::optional<OwnedShard> owned_;
    bool close_told_ = false;
    std::pair<bool, std::uint32_t> told_;  // entered and final granules, when the ledger was told last

    std::optional<ReceivedMeans> means_;

    bool verdict_ = false;  // an owner has accepted a contribution with an Inf or a NaN
    OpReport report_;
};

}  // namespace tailcut
