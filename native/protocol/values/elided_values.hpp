// Values that are not there, for simulations of more ranks than there is memory for. Packets, runs and
// accounts are those of raw and planes, without the memory and the arithmetic. Fates are real; payloads are
// bytes that nobody reads. Nothing is ever Inf or NaN, and all blocks count as Gaussian: gains are sent only
// with means of coarse or uneven contributions.
#pragma once

#include <optional>

#include "codec/planes.hpp"
#include "protocol/values/raw_values.hpp"

namespace tailcut {

// So many bytes of a payload that nobody looks at.
std::span<const std::byte> nothing(std::size_t bytes);

class ElidedRawContributions : public RawContributions {
public:
    using RawContributions::RawContributions;

private:
    void put_values(Rank shard, std::uint32_t first, std::uint32_t coords, Outgoing& out) const override;
};

class ElidedPlanesContributions final : public Contributions {
public:
    ElidedPlanesContributions(const OpContext& context, const Plan& plan, const Coding& coding,
                              std::span<const float>)
        : context_(context), plan_(plan), coding_(coding) {}

    std::uint32_t steps(Rank shard) const override { return std::max(1u, order(shard).packets()); }
    bool next(Rank shard, const GranuleSet& answered, std::uint32_t& sent, Outgoing& out) override;

private:
    struct Place {
        Rank shard;
        std::uint32_t stripe;
        bool operator==(const Place&) const = default;
    };
    codec::SendOrder order(Rank shard) const;

    const OpContext& context_;
    const Plan plan_;
    const Coding coding_;
    // The stripe of the latest packet, cached because packets to one owner mostly follow each other.
    std::optional<Place> place_;
    codec::Stripe stripe_;
};

// What both reductions share: accounts of memory that does not exist.
class ElidedReduction : public Reduction {
public:
    ElidedReduction(const OpContext& context, const Plan& plan, Block memory)
        : context_(context),
          plan_(plan),
          shard_(plan.own_shard()),
          memory_(std::move(memory)),
          compacted_(!memory_ || plan.layout.shard_stride() * (plan.layout.ranks - 1u) == 0) {}

    void enter(float*, const Coding&) override { entered_ = true; }
    // Nothing that has come is kept; the own contribution is there from the entry on.
    void hand_on(const std::vector<GranuleSet>&, const GranuleSet&) override {
        LateShard* late = context_.carry.late_shard(plan_);
        if (entered_ && late && !late->put_own({})) context_.carry.note_eviction();
    }
    void offer(const wire::Header&, std::uint32_t, std::uint32_t, std::span<const std::byte>) override {}
    void save() override {}
    void take_over(std::span<const Run>, float*) const override {}
    void hand_back(bool) override {}
    void compact(Block smaller) override {
        memory_ = std::move(smaller);
        compacted_ = true;
    }
    bool compacted() const override { return compacted_; }
    bool pooled() const override { return memory_.pooled(); }
    void leave_pool() override { memory_.leave_pool(); }

protected:
    // Notes granules [first, last) with the contributions that arrived.
    virtual void note(std::uint32_t first, std::uint32_t last, const std::vector<GranuleSet>& arrived);

    const OpContext& context_;
    const Plan plan_;
    const Rank shard_;
    bool entered_ = false;

private:
    Block memory_;
    bool compacted_;  // true from the beginning if there is nothing but the mean
};

class ElidedRawReduction : public ElidedReduction {
public:
    ElidedRawReduction(const OpContext& context, const Plan& plan, const Coding&, Block memory)
        : ElidedReduction(context, plan, std::move(memory)) {}

    bool reduce(std::uint32_t first, std::uint32_t last, const std::vector<GranuleSet>& arrived,
                std::vector<Run>& runs) override {
        note(first, last, arrived);
        cut(first, last, arrived, runs);
        return false;
    }
    std::uint32_t packet(Destination to, const Run& run, Outgoing& out) const override;
    std::size_t mean_floats() const override { return plan_.layout.shard_stride(); }

protected:
    void cut(std::uint32_t first, std::uint32_t last, const std::vector<GranuleSet>& arrived,
             std::vector<Run>& runs) const;
};

class ElidedPlanesReduction : public ElidedReduction {
public:
    ElidedPlanesReduction(const OpContext& context, const Plan& plan, const Coding& gather, Block memory);

    void enter(float* bucket_shard, const Coding& gather) override {
        ElidedReduction::enter(bucket_shard, gather);
        coding_ = gather;
    }
    void offer(const wire::Header& header, std::uint32_t, std::uint32_t,
               std::span<const std::byte>) override {
        sent_planes_ = header.planes;
    }
    bool reduce(std::uint32_t first, std::uint32_t last, const std::vector<GranuleSet>& arrived,
                std::vector<Run>& runs) override;
    std::uint32_t packet(Destination to, const Run& run, Outgoing& out) const override;
    std::size_t mean_floats() const override;
    std::uint32_t unit_end(std::uint32_t granule) const override {
        const codec::SendOrder order = send_order();
        return order.first_granule(order.stripe_of_granule(granule) + 1);
    }

protected:
    virtual void reduce_stripe(const codec::Stripe& stripe, const std::vector<GranuleSet>& arrived,
                               std::vector<Run>& runs);
    void note(std::uint32_t first, std::uint32_t last, const std::vector<GranuleSet>& arrived) override;
    codec::SendOrder send_order() const;
    // Packets of a stripe, cut where nobody has delivered.
    void cut(const codec::Stripe& stripe, const std::vector<GranuleSet>& arrived, bool gains,
             std::vector<Run>& runs);
    bool needs_gains(const codec::Stripe& stripe, const std::vector<GranuleSet>& arrived) const;
    codec::PlanesHead head_at(std::uint32_t granule) const;

    Coding coding_;
    int sent_planes_ = 0;  // of the latest contribution

private:
    std::vector<std::uint32_t> open_;     // by stripe: granules that are not closed yet
    std::vector<std::uint16_t> lengths_;  // by granule: length of the mean's packet that begins there
    std::vector<bool> gains_;             // by stripe: whether its packets have gains
};

class ElidedMeans : public Means {
public:
    ElidedMeans(const OpContext& context, const Plan& plan, Block memory)
        : context_(context), plan_(plan), memory_(std::move(memory)) {}

    bool place(const wire::Header&, std::uint32_t, std::uint32_t, std::span<const std::byte>) override {
        return true;
    }
    // As RawMeans. What planes make of a trimmed mean is a matter of values.
    bool refine(const wire::Header&, std::uint32_t first, std::uint32_t last, GranuleSet& answered) override {
        return context_.codec == wire::Codec::kRaw && !answered.all(first, last);
    }
    void note_answers(Rank, std::uint32_t, std::uint32_t, const GranuleSet&, const GranuleSet&) override {}
    void enter(std::span<float>, const std::vector<GranuleSet>&, bool) override { memory_ = {}; }
    void end(const StandIn& stand_in, std::vector<GranuleSet>& answered,
             const std::vector<GranuleSet>& held) override;

private:
    const OpContext& context_;
    const Plan plan_;
    Block memory_;
};

}  // namespace tailcut
