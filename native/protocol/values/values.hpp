// How the coordinates of one op travel in one codec. Op and OwnedShard know which granules have come and when
// a stage ends; the classes here know bytes and arithmetic. The variants are in raw_values.hpp,
// planes_values.hpp and elided_values.hpp; `Values` makes those that an endpoint uses.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "codec/send_order.hpp"
#include "protocol/carry/late_shard.hpp"
#include "protocol/ops/granules.hpp"
#include "protocol/ops/layout.hpp"
#include "protocol/ops/memory.hpp"
#include "protocol/ops/op_context.hpp"
#include "protocol/ops/terms.hpp"
#include "protocol/sending/outgoing.hpp"
#include "protocol/values/energies.hpp"
#include "wire/header.hpp"

namespace tailcut {

// Granules [first, last) of a shard whose mean is final; `empty`: nobody delivered them.
struct Run {
    std::uint32_t first, last;
    bool empty;
};

// What this rank sends to the owners of the other shards. A step is the smallest unit that is sent.
class Contributions {
public:
    virtual ~Contributions() = default;
    const Energies& energies() const { return energies_; }
    virtual std::uint32_t steps(Rank shard) const = 0;
    // Fills in payload, place, codec and NON-FINITE of the packet at step `sent`, and advances `sent`.
    // Returns false if there is no packet, because the owner has already answered: it is too late for this op.
    virtual bool next(Rank shard, const GranuleSet& answered, std::uint32_t& sent, Outgoing& out) = 0;
    virtual void retract(const Outgoing&) {}  // the packet was not sent after all

    // ---- what is sent late (rule 9)
    virtual void note_delivered(Rank, std::uint32_t) {}  // the packet at this step of the shard has come
    // Granules [first, last) of the bucket are about to be overwritten: keeps what was not delivered of them.
    virtual void keep(Rank, std::uint32_t, std::uint32_t) {}
    // The bucket goes back to the caller. Keeps what was not delivered in the pool; returns false if that has no
    // room.
    virtual bool keep_rest() { return true; }

    std::span<float> residue;  // of the bucket: what coding takes from contributions is noted there; or empty

protected:
    Energies energies_;
};

// The values of the owned shard: contributions in, a mean out.
class Reduction {
public:
    virtual ~Reduction() = default;
    const Energies& energies() const { return energies_; }
    // `bucket_shard` is where the own contribution is, if there is one, and where the mean goes until
    // hand_back(). `gather` is the mean's coding.
    virtual void enter(float* bucket_shard, const Coding& gather) = 0;
    // Who will never contribute, by rank: the others are awaited when their granules have been reduced without
    // them (rule 9).
    void expect(const std::vector<bool>& abstains) { abstains_ = &abstains; }
    void skip() {
        abstains_ = nullptr;
    }  // what is not final is given up: nothing is late, nothing is carried into it
    std::uint16_t loss_scale_tag = 0;  // of the op
    // Of the own shard: what coding has taken from the last mean, times the members, and where that of this one is noted; or
    // empty.
    std::span<float> residue;
    // Nobody is left to apply the mean: hands on what has arrived and is not final.
    virtual void hand_on(const std::vector<GranuleSet>&, const GranuleSet&) {}
    // Offers granules [first, last) of a contribution. A reduce() may follow, and then a save().
    virtual void offer(const wire::Header& header, std::uint32_t first, std::uint32_t last,
                       std::span<const std::byte> payload) = 0;
    virtual void save() = 0;
    // Nothing more will come for these granules; the range may be empty. Appends all runs that have
    // become final since the last call; a run may become final later than it is closed. Returns whether any
    // mean is Inf or NaN. `arrived` says, by rank, which contributions there are.
    virtual bool reduce(std::uint32_t first, std::uint32_t last, const std::vector<GranuleSet>& arrived,
                        std::vector<Run>& runs) = 0;
    // The end of the granules that are reduced together with this one.
    virtual std::uint32_t unit_end(std::uint32_t granule) const { return granule + 1; }
    // Whether ranks outside the group apply the mean too. Such a mean becomes final some time after the
    // close.
    virtual bool shared_beyond_group() const { return false; }
    // What is not final after the close becomes EMPTY. The next reduce() reports it.
    virtual void leave_rest_empty() {}
    // Puts the next packet of a run, or of what is left of it: fills in payload, place and codec. Returns its
    // granules.
    virtual std::uint32_t packet(Destination to, const Run& run, Outgoing& out) const = 0;
    // Writes the mean of these runs, which became final before enter().
    virtual void take_over(std::span<const Run> runs, float* bucket_shard) const = 0;
    // The caller takes its shard back. `needed`: some of the mean still has to be sent to a peer.
    virtual void hand_back(bool needed) = 0;

    virtual std::size_t mean_floats() const = 0;
    virtual void compact(Block smaller) = 0;  // keeps only the mean
    virtual bool compacted() const = 0;
    virtual bool pooled() const = 0;
    virtual void leave_pool() = 0;

protected:
    Energies energies_;
    const std::vector<bool>* abstains_ = nullptr;
};

// What an op puts where a mean has not come (rule 9).
struct StandIn {
    bool carried = false;       // the mean may still come, and the difference is added to a later result
    std::vector<float> shares;  // by shard: of the own gradient
};

// How much of the own gradient is in the mean: sums over a sample of coordinates.
struct Correlation {
    double product = 0, squares = 0;

    void note(std::span<const float> own, const float* mean) {
        for (std::size_t k = 0; k < own.size(); ++k) {
            product += double{own[k]} * mean[k];
            squares += double{own[k]} * own[k];
        }
    }
};
inline constexpr std::uint32_t kSampledGranules = 16;  // one granule of so many is in the sample

// Granules [first, last) of a shard whose late mean is to be added.
using DueVisit = std::function<void(Rank shard, std::uint32_t first, std::uint32_t last)>;

// Means coming in from the owners of the other shards.
class Means {
public:
    virtual ~Means() = default;
    const Energies& energies() const { return energies_; }
    const Correlation& correlation() const { return correlation_; }
    // Values of granules [first, last) of the header's shard have come. Returns false if there is no memory.
    virtual bool place(const wire::Header& header, std::uint32_t first, std::uint32_t last,
                       std::span<const std::byte> payload) = 0;
    // Some of the granules [first, last) of a packet are answered. Whether that was a trimmed packet, which this one
    // completes; granules that it replaces are no longer answered.
    virtual bool refine(const wire::Header&, std::uint32_t, std::uint32_t, GranuleSet&) { return false; }
    // Called after answers to [first, last), with values or EMPTY.
    virtual void note_answers(Rank shard, std::uint32_t first, std::uint32_t last, const GranuleSet& answered,
                              const GranuleSet& held) = 0;
    // From now on values go to the bucket. Those that came before are moved there. `own`: the bucket holds the
    // own contribution.
    virtual void enter(std::span<float> bucket, const std::vector<GranuleSet>& held, bool own) = 0;
    // Fills in what did not come. What cannot be carried for lack of memory counts as answered.
    virtual void end(const StandIn& stand_in, std::vector<GranuleSet>& answered,
                     const std::vector<GranuleSet>& held) = 0;

    // ---- after the end: means that come are kept as differences to what was filled in
    virtual void reopen(std::vector<GranuleSet>&) {
    }  // what came trimmed counts as not answered: the whole may come
    virtual bool due() const { return false; }  // there is one to be added
    virtual void each_due(const DueVisit&) const {}
    // Adds them, times `factor`; returns how many coordinates that was.
    virtual std::uint64_t add_late(std::span<float>, float) { return 0; }
    virtual void give_back() {}  // what was added is due again
    virtual void settle() {}     // what was added is not needed any more
    // Nothing is added to these coordinates of the bucket.
    virtual void forget(std::uint64_t, std::uint64_t) {}

protected:
    // Notes coordinates of a mean of all ranks that came or did not come. The values are not read.
    void note_nominal(double coords, bool came, Rank ranks) {
        energies_.received += coords / ranks;
        if (!came) energies_.received_lost += coords / ranks;
    }
    Energies energies_;
    Correlation correlation_;
};

// Makes the values of an endpoint's ops, which are all of one kind.
class Values {
public:
    virtual ~Values() = default;
    virtual std::unique_ptr<Contributions> contributions(const OpContext& context, const Plan& plan,
                                                         const Coding& coding,
                                                         std::span<const float> bucket) = 0;
    virtual std::unique_ptr<Reduction> reduction(const OpContext& context, const Plan& plan,
                                                 const Coding& gather, Block memory) = 0;
    virtual std::unique_ptr<Means> means(const OpContext& context, const Plan& plan, Block memory) = 0;
    // Grids have none: they do not carry.
    virtual std::unique_ptr<LateShard> late_shard(const OpContext&, const Plan&) { return nullptr; }
};

template <typename ItsContributions, typename ItsReduction, typename ItsMeans>
class ValuesOf : public Values {
public:
    std::unique_ptr<Contributions> contributions(const OpContext& context, const Plan& plan,
                                                 const Coding& coding,
                                                 std::span<const float> bucket) override {
        return std::make_unique<ItsContributions>(context, plan, coding, bucket);
    }
    std::unique_ptr<Reduction> reduction(const OpContext& context, const Plan& plan, const Coding& gather,
                                         Block memory) override {
        return std::make_unique<ItsReduction>(context, plan, gather, std::move(memory));
    }
    std::unique_ptr<Means> means(const OpContext& context, const Plan& plan, Block memory) override {
        return std::make_unique<ItsMeans>(context, plan, std::move(memory));
    }
};

template <typename ItsLateShard, typename... Its>
class CarryingValuesOf final : public ValuesOf<Its...> {
public:
    std::unique_ptr<LateShard> late_shard(const OpContext& context, const Plan& plan) override {
        return std::make_unique<ItsLateShard>(context, plan);
    }
};

std::unique_ptr<Values> make_values(wire::Codec codec, bool elided);

// The memory that a reduction takes, in floats.
std::size_t owned_floats(wire::Codec codec, const Layout& layout);

}  // namespace tailcut
