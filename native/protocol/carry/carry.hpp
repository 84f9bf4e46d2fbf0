// Rule 9, late is carried: what is late for the buckets of one rank, until the next op of the bucket takes it in.
// As owner it keeps late contributions (E), as receiver the means that it ended an op without.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "protocol/carry/late_shard.hpp"
#include "protocol/ops/received_means.hpp"
#include "protocol/reports/counters.hpp"
#include "protocol/reports/fates.hpp"

namespace tailcut {

class Carry {
public:
    // Without `stands_in` zeros stand in for means that have not come. `keeps_log`: there is a ledger.
    Carry(bool enabled, bool stands_in, Seq late_ops, bool keeps_log, Counters& counters)
        : enabled_(enabled),
          stands_in_(stands_in),
          keeps_log_(keeps_log),
          late_ops_(late_ops),
          counters_(counters) {}

    bool carries(const Plan& plan) const { return enabled_ && plan.bucket.key != 0; }
    // Whether ranks that are so many ops ahead of one may have forgotten that they lack a mean of it.
    bool too_late(Seq ahead) const { return 2 * ahead > late_ops_; }
    // The local rank enters an op. What the last op of this bucket has used was used for good, and what is left
    // of a bucket of another length cannot be applied any more.
    void enter(const Plan& plan);

    // ---- contributions, at the owner
    // Granules [first, last) of the own shard were reduced to `mean` without all: see LateShard::await.
    void await(const OpContext& context, const Plan& plan, std::uint16_t loss_scale_tag, std::uint32_t first,
               std::uint32_t last, const std::vector<GranuleSet>& arrived, const std::vector<bool>& abstains,
               std::span<const float> mean);
    LateShard* late_shard(const Plan& plan);  // null if nothing is awaited
    // A contribution to a shard that has been reduced without it.
    std::optional<wire::Reject> contribute(const Plan& plan, const wire::Header& header,
                                           std::span<const std::byte> payload);
    // Whether there is something for granules [first, last) of the mean of this op.
    bool any(const Plan& user, std::uint32_t first, std::uint32_t last) const;
    // Adds E to `sum`, the coordinates of [first, last), in the order of ops and ranks.
    void add_to(const Plan& user, std::uint16_t loss_scale_tag, std::uint32_t first, std::uint32_t last,
                std::span<float> sum);
    // The local rank enters an op of a later epoch than E is of: the own shard was cut anew. E joins the rank's
    // contribution, in coordinates, and so comes to the owners of now. If all contribute in the end it weighs
    // 1/N, as it should (docs/late.md).
    void hand_over(const Plan& user, std::uint16_t loss_scale_tag, std::span<float> bucket);

    // ---- means, at the receiver
    // What stands in for a mean that has not come: this share of the own gradient, <mean, own> / <own, own>.
    float stand_in_share(const Plan& plan) const;
    void learn(const Plan& plan, const Correlation& correlation);
    void keep(ReceivedMeans means);  // of an op that has ended without some
    std::optional<wire::Reject> place(Time now, const Plan& plan, const wire::Header& header,
                                      std::span<const std::byte> payload);
    // Adds what has come of earlier means to the result of an op; returns how many coordinates that was.
    std::uint64_t add_means(const Plan& user, std::uint16_t loss_scale_tag, std::span<float> bucket);
    // Coordinates [first, last) of a bucket were copied from their owner: nothing more is added to them.
    void forget_means(std::uint32_t key, std::uint64_t first, std::uint64_t last);

    // ---- both
    void give_back(Seq user);  // the op's result was not applied: what it had used is carried again
    // Nobody has applied the results of these ops: what they had used is carried again, and what is late for them is
    // void.
    void skip(Seq from, Seq until);
    void drop_from(Seq seq);    // these ops are void
    void drop_all();            // all replicas were made equal
    void drop_means();          // this rank applies nothing of what it has missed
    void retire(Seq next_seq);  // drops what is late for too many ops
    bool evict();               // gives memory back, the oldest first; false if there is none
    void note_eviction() { ++counters_.evicted_late; }

    // ---- for the ledger
    void admit_by(const LateAdmission& admission) { admission_ = &admission; }
    const LateAdmission* admission() const { return admission_; }  // null: all is taken in
    bool keeps_log() const { return keeps_log_; }
    void note_use(const LateUse& use) {
        if (keeps_log_) log_.uses.push_back(use);
    }
    LateLog take_log() {
        told_uses_ = told_cuts_ = 0;
        return std::exchange(log_, {});
    }
    // What has been added to it since the last call, before it is taken.
    LateLog take_news();

private:
    struct Bucket {
        std::uint32_t length = 0;
        bool entered = false;  // by the local rank
        std::map<Seq, std::unique_ptr<LateShard>> contributions;
        std::map<Seq, ReceivedMeans> means;
        Correlation correlation;
    };
    Bucket* find(const Plan& plan);
    const Bucket* find(const Plan& plan) const { return const_cast<Carry*>(this)->find(plan); }
    void drop(Bucket& bucket);
    void count_dropped(const LateShard& shard) { counters_.dropped_late_coords += shard.unused_coords(); }
    void count_dropped(const ReceivedMeans& means) {
        counters_.dropped_late_coords += means.lacking_coords();
    }

    const bool enabled_, stands_in_, keeps_log_;
    const Seq late_ops_;
    Counters& counters_;
    std::map<std::uint32_t, Bucket> buckets_;  // by key
    LateLog log_;
    std::size_t told_uses_ = 0, told_cuts_ = 0;  // of the log, by take_news()
    const LateAdmission* admission_ = nullptr;
};

}  // namespace tailcut
