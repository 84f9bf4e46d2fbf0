// The codec raw in a column: a contribution is the sum of a row's, and a packet says how many it stands for.
#pragma once

#include <utility>
#include <vector>

#include "protocol/grid/column_values.hpp"
#include "protocol/grid/stands_for.hpp"
#include "protocol/values/raw_values.hpp"

namespace tailcut {

// `Raw`: with values or without.
template <typename Raw>
class WeightedContributions final : public Raw {
public:
    WeightedContributions(const ColumnOps& ops, const OpContext& context, const Plan& plan,
                          const Coding& coding, std::span<const float> bucket)
        : Raw(context, plan, coding, bucket), counts_(ops.at(plan.seq).sum.counts) {}

    // A packet has one count. A shard without coordinates has a granule that the bucket has not.
    bool next(Rank shard, const GranuleSet& answered, std::uint32_t& sent, Outgoing& out) override {
        const std::uint32_t first = sent;
        sent = this->packet_end(shard, first);
        if (this->plan_.layout.length(shard) > 0) {
            const float* counts = counts_.data() + this->plan_.layout.begin(shard) / kGranule;
            sent = run_end(counts, first, sent);
            put_count(counts[first], out.header);
        }
        return this->put_run(shard, first, sent, answered, out);
    }

private:
    const std::vector<float>& counts_;
};

class WeightedReduction final : public RawReduction {
public:
    WeightedReduction(const ColumnOps& ops, const OpContext& context, const Plan& plan, const Coding& gather,
                      Block memory)
        : RawReduction(context, plan, gather, std::move(memory)),
          ops_(ops),
          counts_(std::size_t{plan.layout.ranks} * granules_) {}

    void enter(float* bucket_shard, const Coding& gather) override {
        RawReduction::enter(bucket_shard, gather);
        const auto& own = ops_.at(plan_.seq).sum.counts;
        std::copy_n(own.data() + plan_.layout.begin(shard_) / kGranule,
                    plan_.layout.length(shard_) / kGranule, counts_of(context_.shape.self));
    }
    void offer(const wire::Header& header, std::uint32_t first, std::uint32_t last,
               std::span<const std::byte> payload) override {
        std::fill_n(counts_of(header.source) + first, last - first, count_of(header));
        RawReduction::offer(header, first, last, payload);
    }
    bool reduce(std::uint32_t first, std::uint32_t last, const std::vector<GranuleSet>& arrived,
                std::vector<Run>& runs) override {
        return reduce_runs(first, last, arrived, runs,
                           [&](const auto& came, std::uint32_t from, std::uint32_t& until) {
                               find_sources(came, from, until);
                               float count = 0;
                               for (Rank rank = 0; rank < plan_.layout.ranks; ++rank) {
                                   if (!came[rank].test(from)) continue;
                                   count += counts_of(rank)[from];
                                   until = run_end(counts_of(rank), from, until);
                               }
                               return count;
                           });
    }

private:
    float* counts_of(Rank rank) { return counts_.data() + std::size_t{rank} * granules_; }

    const ColumnOps& ops_;
    std::vector<float> counts_;  // by rank and granule
};

// As in any group.
template <typename Flat>
class ColumnMeansOf final : public Flat {
public:
    ColumnMeansOf(const ColumnOps&, const OpContext& context, const Plan& plan, Block memory)
        : Flat(context, plan, std::move(memory)) {}
};

}  // namespace tailcut
