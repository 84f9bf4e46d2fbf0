// One AllReduce at one rank: contributions going out, the owned shard, means coming in, and the report.
// Told the time, handed parsed packets, asked for packets to send. No clock, no socket, no thread.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "protocol/owned_shard.hpp"
#include "protocol/report.hpp"
#include "protocol/types.hpp"
#include "wire/header.hpp"

namespace tailcut {

class Op {
public:
    // `gather` until the local rank enters.
    Op(OpContext& context, Seq seq, std::uint32_t bucket_len, const Coding& gather);

    Seq seq() const { return seq_; }
    const Layout& layout() const { return layout_; }
    Rank own_shard() const { return shape_.shard_of(shape_.self, seq_); }
    bool entered() const { return entered_; }
    bool finished() const { return finished_; }
    bool owns() const { return owned_.has_value(); }
    bool holds() const { return means_ != nullptr; }

    // Memory comes when it is first needed: for an op not entered yet, from the pool.
    std::size_t own_floats() const { return owned_floats(context_.codec, layout_); }
    void own(Block memory);   // own_floats(); without them the shard can only be closed EMPTY
    void hold(Block memory);  // bucket_len floats

    // The local rank. Needs own(); takes what has already arrived over into the bucket. `weights`: in a column, by granule.
    void enter(Time now, Ticket ticket, std::span<float> bucket, std::span<const float> weights,
               const Terms& terms, bool contributing);

    // Packets that passed the endpoint's checks. scatter() needs own(), gather() needs hold() or an entry.
    std::optional<wire::Reject> scatter(Time now, const wire::Header& header,
                                        std::span<const std::byte> payload, Time source_entered_at);
    std::optional<wire::Reject> gather(Time now, const wire::Header& header,
                                       std::span<const std::byte> payload);
    void abstain(Rank rank, Time now);  // the rank will contribute nothing more
    void forsake(Rank owner);  // after the entry: the owner will send nothing more, as if all were EMPTY
    void forfeit(Time now);    // before the entry: give up the owned shard's memory, all of it is EMPTY

    // What has come from a rank: of its contribution, or of its mean.
    const GranuleSet& came(wire::Stage stage, Rank from) const {
        return stage == wire::Stage::kScatter ? owned_->delivered(from)
                                              : answered_[shape_.shard_of(from, seq_)];
    }

    std::uint32_t own_final() const { return owned_ ? owned_->final_granules() : 0; }
    bool complete() const {
        return entered_ && !finished_ && answered_count_ + own_final() == total_granules_;
    }
    // `bounds` are those of an op that the local rank has not entered.
    OwnedShard::Close close_at(const Bounds& bounds) const {
        return owned_ ? owned_->close_at(entered_ ? bounds_ : bounds) : OwnedShard::Close{};
    }
    // `skip_above`: of an op that the local rank has not entered.
    void close(Time now, Ending ending, float skip_above) {
        owned_->close(now, ending, entered_ ? skip_above_ : skip_above);
    }

    // In a row of a grid: the sum of the own shard is there to be taken, once; then the column's answer is waited for.
    bool summable() const {
        return context_.level == Level::kRow && owned_ && owned_->scattered() && !summed_;
    }
    Sums sum(const Bounds& bounds);  // as close_at()
    void conclude(std::span<const float> means, const GranuleSet& held, std::span<const std::uint8_t> planes,
                  bool non_finite);
    // When the clock ends it for the local rank, and by which rule.
    OwnedShard::Close end_at() const;

    // Ends the op for the caller, whose shard is closed: what did not come is zero. The bucket is not touched afterwards.
    // `awaited`: some of the own mean that was sent may have to be sent again.
    OpReport finish(Time now, Status status, Ending ending, bool awaited, bool record_fates);

    // The next packet for the peer: contributions first, then means. Here and below, a peer may also be the number of ranks:
    // all whom multicast covers.
    bool next_packet(Time now, Rank peer, Outgoing& out);
    // Rule 9: the next one of the mean for a peer that has ended the op.
    bool next_late(Time now, Rank peer, Outgoing& out);
    bool late(Rank peer) const { return owned_ && owned_->late(peer); }
    // One that was lost; false if it is of no use any more.
    bool repeat(Time now, Rank peer, const Parcel& parcel, Outgoing& out);
    void retract(const Outgoing& out);
    bool pending(Rank peer) const;
    bool owes(Rank peer) const { return unsent(peer); }  // some of its contribution
    bool served(Rank peer) const { return (!owned_ || owned_->served(peer)) && !unsent(peer); }
    Audience::Set covered() const { return owned_ ? owned_->covered() : Audience::Set{}; }
    void uncover(Rank peer) {
        if (owned_) owned_->uncover(peer);
    }
    bool closed() const { return !owned_ || owned_->closed(); }
    bool compacted() const { return !owned_ || owned_->compacted(); }
    bool is_history() const { return finished_ && owned_->pooled(); }
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
    bool unsent(Rank peer) const { return peer < shape_.ranks && sent_[peer] < steps_[peer]; }
    bool next_mean(Rank peer, const std::optional<Run>& run, Outgoing& out);
    bool next_contribution(Rank peer, Outgoing& out);
    std::uint32_t put_mean(Rank peer, const Run& run, Outgoing& out);
    void put_end(Rank peer, Outgoing& out);
    void complete_header(Time now, Rank peer, Outgoing& out) const;
    Time gathered_at() const;
    void fill_report(Time now, Status status, Ending ending);
    void fill_links();
    SinceEntry since_entry(Time at) const { return at < 0 ? SinceEntry() : at - entered_at_; }
    void record_fates(Status status);
    void scan_unsent();
    bool non_finite() const { return non_finite_ || (owned_ && owned_->non_finite()); }

    OpContext& context_;
    const Shape& shape_;
    const Seq seq_;
    const Layout layout_;
    std::uint32_t total_granules_ = 0;

    // the local rank
    bool entered_ = false, contributing_ = false, finished_ = false;
    std::span<float> bucket_;
    Bounds bounds_;
    Coding scatter_, gather_;
    float skip_above_ = 0;
    Time entered_at_ = 0, deadline_ = kNever;
    std::unique_ptr<Contributions> contributions_;
    std::vector<std::uint32_t> sent_,
        steps_;  // by peer: what is sent of the contribution to its shard, and all of it

    std::optional<OwnedShard> owned_;
    bool summed_ = false;

    // means coming in, except for the own shard
    std::unique_ptr<Means> means_;
    std::vector<GranuleSet> answered_;  // by shard: granules that came, with a mean or EMPTY
    std::vector<GranuleSet> held_;      // by shard: granules that came with a mean
    std::uint32_t answered_count_ = 0;
    std::vector<std::uint8_t>
        mean_planes_;  // in a column, by shard: with which rows send its mean on; 0: not known
    std::vector<Time> gather_last_at_;  // by owner: the latest packet of its mean; -1: none yet
    std::vector<Time> ripe_at_;         // by owner: the last part of its mean came; -1: not yet
    std::uint32_t unripe_;              // owners whose has not, the local rank left out

    bool non_finite_ = false;
    bool scanned_ = false;  // the whole bucket has been searched for Inf and NaN
    OpReport report_;
};

}  // namespace tailcut
