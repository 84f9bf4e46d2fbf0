// How values travel in a column of a grid with the codec planes. A contribution is the mean of a row, which its packets say
// how many contributions it stands for. All of it is in the row's rotated domain: nothing is rotated here. The mean is kept
// as it was coded, for the rows to send it on.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "protocol/grid/column_ops.hpp"
#include "protocol/values/planes_values.hpp"

namespace tailcut {

// A step is a packet, in the order of sending.
class PartContributions : public Contributions {
public:
    PartContributions(const ColumnOps& ops, const OpContext& context, const Plan& plan, const Coding& coding,
                      std::span<const float> bucket);

    std::uint32_t steps(Rank shard) const override { return first_steps_[shard].back(); }
    bool next(Rank shard, const GranuleSet& answered, std::uint32_t& sent, Outgoing& out) override;
    void retract(const Outgoing& out) override;

protected:
    // Packets on their way out keep it alive.
    struct CodedStripe {
        std::uint32_t index = 0;
        codec::Stripe stripe;                  // of spans: those of one have one scale and one count
        std::vector<float> counts;             // by span
        std::vector<codec::PlanesHead> heads;  // by span
        Block slots;
    };
    virtual void code(Rank shard, CodedStripe& coded);
    virtual std::span<const std::byte> payload(const CodedStripe& coded, const codec::PacketRun& run,
                                               const codec::PlanesHead& head) const;
    bool gaussian(Rank shard, const codec::BlockSpan& span) const;

    const OpContext& context_;
    const Plan plan_;
    const Coding coding_;

private:
    codec::SendOrder order(Rank shard) const;
    CodedStripe plan(Rank shard, std::uint32_t index) const;
    std::uint32_t stripe_of_step(Rank shard, std::uint32_t step) const;

    const RowSum& sum_;
    const std::span<const float> bucket_;
    std::vector<std::vector<std::uint32_t>> first_steps_;    // by shard and stripe, and the end
    std::vector<std::shared_ptr<const CodedStripe>> coded_;  // by shard: the stripe being sent
};

class PartReduction final : public PlanesReduction {
public:
    PartReduction(ColumnOps& ops, const OpContext& context, const Plan& plan, const Coding& gather,
                  Block memory)
        : PlanesReduction(context, plan, gather, std::move(memory)), ops_(ops) {}

    void offer(const wire::Header& header, std::uint32_t first, std::uint32_t last,
               std::span<const std::byte> payload) override;
    void take_over(std::span<const Run>, float*) const override {}
    void hand_back(bool needed) override;

private:
    bool reduce_stripe(const codec::Stripe& stripe, const std::vector<GranuleSet>& arrived,
                       std::vector<Run>& runs) override;
    Own own_sums(const codec::Stripe& stripe, const std::vector<GranuleSet>& arrived) const;

    ColumnOps& ops_;
};

class PartMeans : public Means {
public:
    // `memory`: room for the mean, until the op is entered.
    PartMeans(ColumnOps& ops, const OpContext& context, const Plan& plan, Block memory);

    bool place(const wire::Header& header, std::uint32_t first, std::uint32_t last,
               std::span<const std::byte> payload) override;
    void note_answers(Rank, std::uint32_t, std::uint32_t, const GranuleSet&, const GranuleSet&) override {}
    void enter(std::span<float> bucket, const std::vector<GranuleSet>& held, bool own) override;
    void end(const StandIn& stand_in, std::vector<GranuleSet>& answered,
             const std::vector<GranuleSet>& held) override;

protected:
    // Granules [first, last) of the header's shard, with so many planes.
    void note_packet(const wire::Header& header, std::uint32_t first, std::uint32_t last, int planes);

private:
    ColumnOps& ops_;
    const OpContext& context_;
    const Plan plan_;
    CodedMean early_;  // until the op is entered
    CodedMean* mean_;
};

}  // namespace tailcut
