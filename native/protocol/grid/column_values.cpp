#include "protocol/grid/column_values.hpp"

#include <algorithm>
#include <utility>

#include "protocol/values/elided_values.hpp"
#include "protocol/values/raw_values.hpp"

namespace tailcut {
namespace {

// The end of the run, from `first`, of equal weights.
std::uint32_t run_end(const float* weights, std::uint32_t first, std::uint32_t last) {
    const auto alike = [&](float weight) { return weight == weights[first]; };
    return static_cast<std::uint32_t>(std::find_if_not(weights + first, weights + last, alike) - weights);
}

// A packet has one weight.
template <typename Raw>
class WeightedContributions final : public Raw {
public:
    WeightedContributions(ColumnOps& ops, const OpContext& context, Seq seq, const Layout& layout,
                          const Coding& coding, std::span<const float> bucket)
        : Raw(context, seq, layout, coding, bucket), weights_(ops.weights.at(seq)) {}

    bool next(Rank shard, const GranuleSet& answered, std::uint32_t& sent, Outgoing& out) override {
        const float* weights = weights_.data() + this->layout_.begin(shard) / kGranule;
        const std::uint32_t first = sent;
        // A shard without coordinates has a granule that the bucket has not.
        sent = this->layout_.length(shard) > 0 ? run_end(weights, first, this->packet_end(shard, first)) : 1;
        out.header.scale = weights[first];
        return this->put_run(shard, first, sent, answered, out);
    }

private:
    const std::vector<float>& weights_;
};

class WeightedReduction final : public RawReduction {
public:
    WeightedReduction(ColumnOps& ops, const OpContext& context, Seq seq, const Layout& layout,
                      const Coding& gather, Block memory)
        : RawReduction(context, seq, layout, gather, std::move(memory)),
          ops_(ops),
          seq_(seq),
          coding_(gather),
          weights_(std::size_t{layout.ranks} * granules_) {}

    void enter(float* bucket_shard, const Coding& gather) override {
        RawReduction::enter(bucket_shard, gather);
        coding_ = gather;
        const auto own =
            ops_.weights.at(seq_).begin() + static_cast<std::ptrdiff_t>(layout_.begin(shard_) / kGranule);
        std::copy_n(own, layout_.length(shard_) / kGranule, weights_of(context_.shape.self));
    }
    void offer(const wire::Header& header, std::uint32_t first, std::uint32_t last,
               std::span<const std::byte> payload) override {
        std::fill_n(weights_of(header.source) + first, last - first, header.scale);
        RawReduction::offer(header, first, last, payload);
    }
    bool reduce(std::uint32_t first, std::uint32_t last, const std::vector<GranuleSet>& arrived,
                std::vector<Run>& runs) override {
        return reduce_runs(first, last, arrived, runs,
                           [&](const auto& came, std::uint32_t from, std::uint32_t& until) {
                               find_sources(came, from, until);
                               float weight = 0;
                               for (Rank rank = 0; rank < layout_.ranks; ++rank) {
                                   if (!came[rank].test(from)) continue;
                                   weight += weights_of(rank)[from];
                                   until = run_end(weights_of(rank), from, until);
                               }
                               return weight;
                           });
    }
    std::uint32_t packet(Destination to, const Run& run, Outgoing& out) const override {
        out.header.planes = static_cast<std::uint8_t>(coding_.planes);
        return RawReduction::packet(to, run, out);
    }
    void hand_back(bool needed) override {
        ops_.note_planes(seq_, shard_, coding_.planes);
        RawReduction::hand_back(needed);
    }

private:
    float* weights_of(Rank rank) { return weights_.data() + std::size_t{rank} * granules_; }

    ColumnOps& ops_;
    const Seq seq_;
    Coding coding_;
    std::vector<float> weights_;  // by rank and granule
};

class ColumnMeans final : public RawMeans {
public:
    ColumnMeans(ColumnOps& ops, const OpContext& context, Seq seq, const Layout& layout, Block memory)
        : RawMeans(context, seq, layout, std::move(memory)), ops_(ops), seq_(seq) {
        ops.planes[seq].resize(layout.ranks);
    }
    void place(const wire::Header& header, std::uint32_t first, std::uint32_t last,
               std::span<const std::byte> payload) override {
        ops_.note_planes(seq_, header.shard, header.planes);
        RawMeans::place(header, first, last, payload);
    }

private:
    ColumnOps& ops_;
    const Seq seq_;
};

// A granule has a mean if it has any weight.
class ElidedWeightedReduction final : public ElidedRawReduction {
public:
    ElidedWeightedReduction(ColumnOps& ops, const OpContext& context, Seq seq, const Layout& layout,
                            const Coding& gather, Block memory)
        : ElidedRawReduction(context, seq, layout, gather, std::move(memory)),
          ops_(ops),
          seq_(seq),
          weighty_(1, GranuleSet(layout.granules(shard_))) {}

    void enter(float*, const Coding&) override {
        const auto own =
            ops_.weights.at(seq_).begin() + static_cast<std::ptrdiff_t>(layout_.begin(shard_) / kGranule);
        for (std::uint32_t g = 0; g < layout_.length(shard_) / kGranule; ++g)
            if (own[g] > 0) weighty_[0].set(g, g + 1);
    }
    void offer(const wire::Header& header, std::uint32_t first, std::uint32_t last,
               std::span<const std::byte>) override {
        if (header.scale > 0) weighty_[0].set(first, last);
    }
    bool reduce(std::uint32_t first, std::uint32_t last, const std::vector<GranuleSet>&,
                std::vector<Run>& runs) override {
        return ElidedRawReduction::reduce(first, last, weighty_, runs);
    }

private:
    ColumnOps& ops_;
    const Seq seq_;
    std::vector<GranuleSet> weighty_;  // of one entry
};

class ColumnValues final : public Values {
public:
    ColumnValues(ColumnOps& ops, bool elided) : ops_(ops), elided_(elided) {}

    std::unique_ptr<Contributions> contributions(const OpContext& context, Seq seq, const Layout& layout,
                                                 const Coding& coding,
                                                 std::span<const float> bucket) override {
        if (elided_)
            return std::make_unique<WeightedContributions<ElidedRawContributions>>(ops_, context, seq, layout,
                                                                                   coding, bucket);
        return std::make_unique<WeightedContributions<RawContributions>>(ops_, context, seq, layout, coding,
                                                                         bucket);
    }
    std::unique_ptr<Reduction> reduction(const OpContext& context, Seq seq, const Layout& layout,
                                         const Coding& gather, Block memory) override {
        if (elided_)
            return std::make_unique<ElidedWeightedReduction>(ops_, context, seq, layout, gather,
                                                             std::move(memory));
        return std::make_unique<WeightedReduction>(ops_, context, seq, layout, gather, std::move(memory));
    }
    std::unique_ptr<Means> means(const OpContext& context, Seq seq, const Layout& layout,
                                 Block memory) override {
        if (elided_) return std::make_unique<ElidedMeans>(context, seq, layout, std::move(memory));
        return std::make_unique<ColumnMeans>(ops_, context, seq, layout, std::move(memory));
    }

private:
    ColumnOps& ops_;
    const bool elided_;
};

}  // namespace

std::unique_ptr<Values> make_column_values(ColumnOps& ops, bool elided) {
    return std::make_unique<ColumnValues>(ops, elided);
}

}  // namespace tailcut
