// fp32 values as they are: packets point into the bucket, and runs become final granule by granule.
#pragma once

#include "codec/raw.hpp"
#include "protocol/carry/carry.hpp"
#include "protocol/values/values.hpp"

namespace tailcut {

class RawContributions : public Contributions {
public:
    RawContributions(const OpContext& context, const Plan& plan, const Coding&, std::span<const float> bucket)
        : context_(context), plan_(plan), bucket_(bucket) {
        for (Rank shard = 0; shard < plan.layout.ranks; ++shard)
            shards_.emplace_back(GranuleSet(plan.layout.granules(shard)));
    }

    std::uint32_t steps(Rank shard) const override { return plan_.layout.granules(shard); }
    bool next(Rank shard, const GranuleSet& answered, std::uint32_t& sent, Outgoing& out) override;
    void note_delivered(Rank shard, std::uint32_t step) override;
    void keep(Rank shard, std::uint32_t first, std::uint32_t last) override;
    bool keep_rest() override;

protected:
    // The end of a packet that begins with granule `first`.
    std::uint32_t packet_end(Rank shard, std::uint32_t first) const;
    // Puts the packet of granules [first, last), unless the owner has already answered.
    bool put_run(Rank shard, std::uint32_t first, std::uint32_t last, const GranuleSet& answered,
                 Outgoing& out) const;
    virtual void put_values(Rank shard, std::uint32_t first, std::uint32_t coords, Outgoing& out) const;

    const OpContext& context_;
    const Plan plan_;

private:
    // What is known of the contribution to one shard.
    struct Share {
        explicit Share(GranuleSet none) : delivered(none), kept(std::move(none)) {}
        GranuleSet delivered;
        GranuleSet kept;  // whole packets that are in `values`, because the bucket has been overwritten
        Block values;
    };

    std::span<const float> bucket_;  // empty after keep_rest()
    std::vector<Share> shards_;
};

class RawReduction : public Reduction {
public:
    // `memory` holds one stride per rank: the peers' contributions, then the mean. Without memory all runs
    // are empty.
    RawReduction(const OpContext& context, const Plan& plan, const Coding& gather, Block memory);
    static std::size_t floats(const Layout& layout) { return layout.shard_stride() * layout.ranks; }

    void enter(float* bucket_shard, const Coding&) override { bucket_shard_ = bucket_shard; }
    void offer(const wire::Header& header, std::uint32_t first, std::uint32_t last,
               std::span<const std::byte> payload) override;
    void save() override;
    void hand_on(const std::vector<GranuleSet>& arrived, const GranuleSet& final) override;
    bool reduce(std::uint32_t first, std::uint32_t last, const std::vector<GranuleSet>& arrived,
                std::vector<Run>& runs) override;
    std::uint32_t packet(Destination to, const Run& run, Outgoing& out) const override;
    void take_over(std::span<const Run> runs, float* bucket_shard) const override;
    void hand_back(bool needed) override;

    std::size_t mean_floats() const override { return plan_.layout.shard_stride(); }
    void compact(Block smaller) override;
    bool compacted() const override { return mean_ == memory_.data(); }
    bool pooled() const override { return memory_.pooled(); }
    void leave_pool() override { memory_.leave_pool(); }

protected:
    // Puts the contributions to granule `first` into sources_, in rank order, and returns their total weight.
    // `last` becomes the end of the run that has the same contributions.
    float find_sources(const std::vector<GranuleSet>& arrived, std::uint32_t first, std::uint32_t& last);
    // reduce() with find(arrived, first, last) in place of find_sources().
    template <typename Find>
    bool reduce_runs(std::uint32_t first, std::uint32_t last, const std::vector<GranuleSet>& arrived,
                     std::vector<Run>& runs, Find find);
    // Rule 9: notes who is missing in [first, last), and adds what is carried from earlier ops.
    void await(std::uint32_t first, std::uint32_t last, const std::vector<GranuleSet>& arrived, bool empty);
    void add_carried(std::uint32_t first, std::uint32_t last);
    bool carried(std::uint32_t first, std::uint32_t last) const {
        return abstains_ && memory_ && context_.carry.any(plan_, first, last);
    }
    // [first, last) has no contribution: its mean is EMPTY, except where something is carried.
    void put_empty(std::uint32_t first, std::uint32_t last, std::vector<Run>& runs);
    float* result() const { return bucket_shard_ ? bucket_shard_ : mean_; }

    const OpContext& context_;
    const Plan plan_;
    const Rank shard_;
    const std::uint32_t granules_;
    std::vector<const float*> sources_;  // scratch

private:
    // A contribution in the receive buffer. If it is reduced at once, it need not be copied.
    struct Offer {
        Rank from = 0;
        std::uint32_t first = 0, last = 0;
        std::span<const std::byte> payload;
    };
    float* slot(Rank rank) const;
    const float* source(Rank rank, std::uint32_t granule) const;

    Block memory_;
    float* mean_;
    float* bucket_shard_ = nullptr;
    Offer offer_;
};

template <typename Find>
bool RawReduction::reduce_runs(std::uint32_t first, std::uint32_t last,
                               const std::vector<GranuleSet>& arrived, std::vector<Run>& runs, Find find) {
    bool non_finite = false;
    for (std::uint32_t end; first < last; first = end) {
        end = last;
        if (offer_.first < offer_.last && first < offer_.first) end = std::min(end, offer_.first);
        if (first < offer_.last) end = std::min(end, offer_.last);
        const float weight = find(arrived, first, end);
        const std::uint32_t coords = plan_.layout.coords(shard_, first, end);
        if (weight > 0 && coords > 0) {
            non_finite |= codec::mean_in_order(sources_, weight, coords, result() + first * kGranule);
            energies_ += nominal_energies(coords, sources_.size(), plan_.layout.ranks);
            await(first, end, arrived, false);
            // By granule, so that the result does not depend on how packets came: a negative zero plus zero is zero.
            for (std::uint32_t g = first; carried(first, end) && g < end; ++g)
                if (carried(g, g + 1)) add_carried(g, g + 1);
            runs.push_back({first, end, false});
        } else {
            energies_ += nominal_energies(coords, 0, plan_.layout.ranks);
            await(first, end, arrived, true);
            put_empty(first, end, runs);
        }
        if (first == offer_.first && end == offer_.last) offer_ = {};  // used up: nothing to save
    }
    return non_finite;
}

class RawMeans : public Means {
public:
    // `memory` stands in for the bucket until the local rank enters.
    RawMeans(const OpContext& context, const Plan& plan, Block memory)
        : context_(context), plan_(plan), memory_(std::move(memory)), base_(memory_.data()) {}

    bool place(const wire::Header& header, std::uint32_t first, std::uint32_t last,
               std::span<const std::byte> payload) override;
    bool refine(const wire::Header&, std::uint32_t first, std::uint32_t last, GranuleSet& answered) override {
        return !answered.all(first, last);
    }
    void note_answers(Rank shard, std::uint32_t first, std::uint32_t last, const GranuleSet& answered,
                      const GranuleSet& held) override;
    void enter(std::span<float> bucket, const std::vector<GranuleSet>& held, bool own) override;
    void end(const StandIn& stand_in, std::vector<GranuleSet>& answered,
             const std::vector<GranuleSet>& held) override;

    bool due() const override;
    void each_due(const DueVisit& visit) const override;
    std::uint64_t add_late(std::span<float> bucket, float factor) override;
    void give_back() override;
    void settle() override;
    void forget(std::uint64_t first, std::uint64_t last) override;

private:
    // What is late of one shard's mean.
    struct Late {
        Block values;           // what was filled in; where a mean has come since, the difference to it
        GranuleSet due, added;  // granules with a difference, not added yet and added
        GranuleSet forgotten;   // granules to which nothing is added
    };
    void sample(Rank shard, std::uint32_t first, std::uint32_t last, const std::byte* mean);
    bool keep(Rank shard, float share, GranuleSet& answered);

    const OpContext& context_;
    const Plan plan_;
    Block memory_;
    float* base_;
    bool own_ = false;        // the bucket holds the own contribution where no mean has come
    std::vector<Late> late_;  // by shard, after the end; empty if nothing is late
};

}  // namespace tailcut
