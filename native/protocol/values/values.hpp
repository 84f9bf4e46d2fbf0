// How the coordinates of one op travel in one codec. Op and OwnedShard know which granules have come and when
// a stage ends; the classes here know bytes and arithmetic. The variants are in raw_values.hpp,
// planes_values.hpp and elided_values.hpp; `Values` makes those that an endpoint uses.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "codec/send_order.hpp"
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
    // Returns false if there is no packet, because the owner has already answered (rule 2) and the bucket
    // holds the answer.
    virtual bool next(Rank shard, const GranuleSet& answered, std::uint32_t& sent, Outgoing& out) = 0;
    virtual void retract(const Outgoing& out) = 0;
    // The first granule of the shard from which on no value has been examined.
    virtual std::uint32_t first_unseen(Rank shard, std::uint32_t sent) const = 0;

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
    // Offers granules [first, last) of a contribution. A reduce() may follow, and then a save().
    virtual void offer(const wire::Header& header, std::uint32_t first, std::uint32_t last,
                       std::span<const std::byte> payload) = 0;
    virtual void save() = 0;
    // Nothing more will come for these granules; the range may be empty. Appends all runs that have
    // become final since the last call; a run may become final later than it is closed. Returns whether any
    // mean is Inf or NaN. `arrived` says, by rank, which contributions there are.
    virtual bool reduce(std::uint32_t first, std::uint32_t last, const std::vector<GranuleSet>& arrived,
                        std::vector<Run>& runs) = 0;
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
};

// Means coming in from the owners of the other shards.
class Means {
public:
    virtual ~Means() = default;
    const Energies& energies() const { return energies_; }
    // Values of granules [first, last) of the header's shard have come.
    virtual void place(const wire::Header& header, std::uint32_t first, std::uint32_t last,
                       std::span<const std::byte> payload) = 0;
    // Called after answers to [first, last), with values or EMPTY.
    virtual void note_answers(Rank shard, std::uint32_t first, std::uint32_t last, const GranuleSet& answered,
                              const GranuleSet& held) = 0;
    // From now on values go to the bucket. Those that came before are moved there.
    virtual void enter(std::span<float> bucket, const std::vector<GranuleSet>& held) = 0;
    // What did not come is zero.
    virtual void end(Rank own_shard, const std::vector<GranuleSet>& held) = 0;

protected:
    // Notes coordinates of a mean of all ranks that came or did not come. The values are not read.
    void note_nominal(double coords, bool came, Rank ranks) {
        energies_.received += coords / ranks;
        if (!came) energies_.received_lost += coords / ranks;
    }
    Energies energies_;
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
};

template <typename ItsContributions, typename ItsReduction, typename ItsMeans>
class ValuesOf final : public Values {
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

std::unique_ptr<Values> make_values(wire::Codec codec, bool elided);

// The memory that a reduction takes, in floats.
std::size_t owned_floats(wire::Codec codec, const Layout& layout);

}  // namespace tailcut
