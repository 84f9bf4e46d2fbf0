#include "protocol/grid/elided_grid_values.hpp"

#include <algorithm>
#include <map>

#include "protocol/grid/part_values.hpp"
#include "protocol/grid/parts.hpp"
#include "protocol/grid/row_reductions.hpp"
#include "protocol/grid/stands_for.hpp"
#include "protocol/grid/weighted_values.hpp"
#include "protocol/values/elided_values.hpp"

namespace tailcut {
namespace {

// ---- rows -------------------------------------------------------------------------------------------------

template <typename Elided>
class ElidedRowOf : public RowOf<Elided> {
public:
    using RowOf<Elided>::RowOf;

protected:
    // Contributions count without what coarse ones lack.
    void sum(const std::vector<GranuleSet>& arrived, RowSum& sum) override {
        if (this->plan_.layout.length(this->shard_) == 0) return;
        this->note(0, this->granules(), arrived);
        for (std::uint32_t g = 0; g < sum.counts.size(); ++g)
            sum.counts[g] = static_cast<float>(std::count_if(
                arrived.begin(), arrived.end(), [&](const GranuleSet& set) { return set.test(g); }));
    }
};

class ElidedRawRowReduction final : public ElidedRowOf<ElidedRawReduction> {
public:
    using ElidedRowOf::ElidedRowOf;

private:
    void put(const RowMean& mean, std::vector<Run>& runs) override { cut(0, granules(), {mean.held}, runs); }
};

class ElidedPlanesRowReduction final : public ElidedRowOf<ElidedPlanesReduction> {
public:
    using ElidedRowOf::ElidedRowOf;

    std::uint32_t packet(Destination, const Run& run, Outgoing& out) const override {
        const codec::PlanesHead& head = heads_.at(run.first);
        codec::put_run(head, run.first, plan_.layout.length(shard_), out.header);
        out.payload = nothing(head.payload_bytes());
        return head.granules;
    }

private:
    void sum(const std::vector<GranuleSet>& arrived, RowSum& sum) override {
        ElidedRowOf::sum(arrived, sum);
        const bool fine = sent_planes_ == 0 || sent_planes_ >= codec::kMeasuredBits;
        sum.gaussian.assign(codec::Blocks(granules() * kGranule).count(), fine);
    }
    void put(const RowMean& mean, std::vector<Run>& runs) override {
        energies_.mean_quantized += energies_.mean * mean.sums_noise;
        const Forwarding forwarding(mean, granules());
        const codec::SendOrder order = send_order();
        if (order.stripes() == 0) runs.push_back({0, granules(), true});  // without coordinates
        const auto most = [&](int planes) {
            return context_.granules(context_.gather_limits, {planes, coding_.whole});
        };
        for (std::uint32_t k = 0; k < order.stripes(); ++k)
            for (const Forwarding::Piece& piece : forwarding.pieces(order.stripe(k).blocks, most)) {
                runs.push_back({piece.first, piece.last, !piece.packet});
                if (!piece.packet) continue;
                codec::PlanesHead head = piece.packet->head;
                head.granules = piece.last - piece.first;
                heads_.emplace(piece.first, head);
            }
    }

    std::map<std::uint32_t, codec::PlanesHead> heads_;  // of the mean's packets, by granule
};

// ---- columns ----------------------------------------------------------------------------------------------

// Which granules rows have anything of, by rank: there a mean is.
class Counted {
public:
    Counted(const ColumnOps& ops, const Plan& plan, Rank shard)
        : ops_(ops),
          plan_(plan),
          shard_(shard),
          sets_(plan.layout.ranks, GranuleSet(plan.layout.granules(shard))) {}

    void enter(Rank self) {
        const float* own = ops_.at(plan_.seq).sum.counts.data() + plan_.layout.begin(shard_) / kGranule;
        for (std::uint32_t g = 0; g < plan_.layout.length(shard_) / kGranule; ++g)
            if (own[g] > 0) sets_[self].set(g, g + 1);
    }
    void note(Rank from, std::uint32_t first, std::uint32_t last, float count) {
        if (count > 0) sets_[from].set(first, last);
    }
    // Of those that arrived.
    std::vector<GranuleSet> among(const std::vector<GranuleSet>& arrived) const {
        std::vector<GranuleSet> sets = sets_;
        for (std::size_t rank = 0; rank < sets.size(); ++rank) sets[rank].keep_only(arrived[rank]);
        return sets;
    }

private:
    const ColumnOps& ops_;
    const Plan plan_;
    const Rank shard_;
    std::vector<GranuleSet> sets_;
};

class ElidedWeightedReduction final : public ElidedRawReduction {
public:
    ElidedWeightedReduction(const ColumnOps& ops, const OpContext& context, const Plan& plan,
                            const Coding& gather, Block memory)
        : ElidedRawReduction(context, plan, gather, std::move(memory)), counted_(ops, plan, shard_) {}

    void enter(float*, const Coding&) override { counted_.enter(context_.shape.self); }
    void offer(const wire::Header& header, std::uint32_t first, std::uint32_t last,
               std::span<const std::byte>) override {
        counted_.note(header.source, first, last, count_of(header));
    }
    bool reduce(std::uint32_t first, std::uint32_t last, const std::vector<GranuleSet>& arrived,
                std::vector<Run>& runs) override {
        return ElidedRawReduction::reduce(first, last, counted_.among(arrived), runs);
    }

private:
    Counted counted_;
};

class ElidedPartContributions final : public PartContributions {
public:
    using PartContributions::PartContributions;

private:
    void code(Rank shard, CodedStripe& coded) override {
        const auto& spans = coded.stripe.blocks;
        bool fine = true;
        for (std::size_t b = 0; b < spans.size(); ++b)
            fine = fine && (coded.counts[b] == 0 || gaussian(shard, spans[b]));
        const std::uint16_t gain = fine ? std::uint16_t{0} : codec::kNominalGain;
        for (std::size_t b = 0; b < spans.size(); ++b)
            coded.heads.push_back(coded.counts[b] > 0 ? codec::PlanesHead{0, coding_.planes, 1.0f, gain, 0}
                                                      : codec::PlanesHead{0, 1, 0, 0, 0});
    }
    std::span<const std::byte> payload(const CodedStripe&, const codec::PacketRun&,
                                       const codec::PlanesHead& head) const override {
        return nothing(head.payload_bytes());
    }
};

class ElidedPartReduction final : public ElidedPlanesReduction {
public:
    ElidedPartReduction(ColumnOps& ops, const OpContext& context, const Plan& plan, const Coding& gather,
                        Block memory)
        : ElidedPlanesReduction(context, plan, gather, std::move(memory)),
          counted_(ops, plan, shard_),
          ops_(ops) {}

    void enter(float* bucket_shard, const Coding& gather) override {
        ElidedPlanesReduction::enter(bucket_shard, gather);
        counted_.enter(context_.shape.self);
    }
    void offer(const wire::Header& header, std::uint32_t first, std::uint32_t last,
               std::span<const std::byte>) override {
        const float count = count_of(header);
        counted_.note(header.source, first, last, count);
        if (count > 0) sent_planes_ = header.planes;
    }
    void hand_back(bool needed) override {
        const auto origin = static_cast<std::uint32_t>(plan_.layout.begin(shard_) / kGranule);
        for (const std::uint32_t first : packets_)
            ops_.at(plan_.seq).mean.packets.push_back({origin + first, head_at(first)});
        ElidedPlanesReduction::hand_back(needed);
    }

private:
    void reduce_stripe(const codec::Stripe& stripe, const std::vector<GranuleSet>& arrived,
                       std::vector<Run>& runs) override {
        const std::uint32_t first = stripe.first_granule(), last = stripe.last_granule();
        const std::vector<GranuleSet> counted = counted_.among(arrived);
        const std::size_t before = runs.size();
        note(first, last, counted);
        cut(stripe_of(spans_of(plan_.layout, shard_, first, last),
                      context_.granules(context_.gather_limits, coding_)),
            counted, needs_gains(stripe, counted), runs);
        for (std::size_t k = before; k < runs.size(); ++k)
            if (!runs[k].empty) packets_.push_back(runs[k].first);
    }

    Counted counted_;
    ColumnOps& ops_;
    std::vector<std::uint32_t> packets_;  // of the mean, by their first granule
};

class ElidedPartMeans final : public PartMeans {
public:
    using PartMeans::PartMeans;

    bool place(const wire::Header& header, std::uint32_t first, std::uint32_t last,
               std::span<const std::byte> payload) override {
        note_packet(header, first, last, std::max(1, codec::cut_of(codec::head_of(header), payload).bits));
        return true;
    }
};

}  // namespace

std::unique_ptr<Values> make_elided_row_values(wire::Codec codec) {
    if (codec == wire::Codec::kPlanes)
        return std::make_unique<ValuesOf<ElidedPlanesContributions, ElidedPlanesRowReduction, ElidedMeans>>();
    return std::make_unique<ValuesOf<ElidedRawContributions, ElidedRawRowReduction, ElidedMeans>>();
}

std::unique_ptr<Values> make_elided_column_values(ColumnOps& ops, wire::Codec codec) {
    if (codec == wire::Codec::kPlanes)
        return std::make_unique<
            ColumnValuesOf<ElidedPartContributions, ElidedPartReduction, ElidedPartMeans>>(ops);
    return std::make_unique<ColumnValuesOf<WeightedContributions<ElidedRawContributions>,
                                           ElidedWeightedReduction, ColumnMeansOf<ElidedMeans>>>(ops);
}

}  // namespace tailcut
