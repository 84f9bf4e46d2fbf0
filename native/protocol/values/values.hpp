// How the coordinates of one op travel, in one codec: what Op and OwnedShard leave open. They know which granules have
// come and when a stage ends; these know bytes and arithmetic. The variants are in raw_values.hpp, planes_values.hpp and
// elided_values.hpp; `Values` makes those that an endpoint uses.
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

// What this rank sends to the owners of the other shards. A step is the least that is sent at a time.
class Contributions {
public:
    virtual ~Contributions() = default;
    const Energies& energies() const { return energies_; }
    virtual std::uint32_t steps(Rank shard) const = 0;
    // Fills in payload, place, codec and NON-FINITE of the packet at step `sent` and moves it on. False: there is none,
    // because the owner has already answered (rule 2; and the bucket holds the answer).
    virtual bool next(Rank shard, const GranuleSet& answered, std::uint32_t& sent, Outgoing& out) = 0;
    virtual void retract(const Outgoing& out) = 0;
    // The granules of the shard from which on nothing has been looked at.
    virtual std::uint32_t first_unseen(Rank shard, std::uint32_t sent) const = 0;

protected:
    Energies energies_;
};

// The values of the owned shard: contributions in, a mean out.
class Reduction {
public:
    virtual ~Reduction() = default;
    const Energies& energies() const { return energies_; }
    // Where the own contribution is, if there is one, and where the mean goes until hand_back(); and the mean's coding.
    virtual void enter(float* bucket_shard, const Coding& gather) = 0;
    // Granules [first, last) of a contribution. save() follows, and in between perhaps reduce().
    virtual void offer(const wire::Header& header, std::uint32_t first, std::uint32_t last,
                       std::span<const std::byte> payload) = 0;
    virtual void save() = 0;
    // Granules for which nothing more will come; perhaps none. Appends all runs that have become final since the last call.
    // A run may become final later than it is closed. Returns whether any mean is Inf or NaN. Contributions are those
    // that `arrived`, by rank, says.
    virtual bool reduce(std::uint32_t first, std::uint32_t last, const std::vector<GranuleSet>& arrived,
                        std::vector<Run>& runs) = 0;
    // Whether others than the ranks of the group apply the mean, too. Such a mean is final some time after the close.
    virtual bool shared_beyond_group() const { return false; }
    // What is not final after the close becomes EMPTY; the next reduce() says so.
    virtual void give_up() {}
    // The next packet of a run, cut to what is left of it: fills in payload, place and codec, returns its granules.
    virtual std::uint32_t packet(Destination to, const Run& run, Outgoing& out) const = 0;
    // Writes the mean of these runs, which became final before enter().
    virtual void take_over(std::span<const Run> runs, float* bucket_shard) const = 0;
    // The caller takes its shard back; `needed`: a peer still has to be sent some of the mean.
    virtual void hand_back(bool needed) = 0;

    virtual std::size_t mean_floats() const = 0;
    virtual void compact(Block smaller) = 0;  // keep the mean only
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
    // The values of granules [first, last) of the header's shard.
    virtual void place(const wire::Header& header, std::uint32_t first, std::uint32_t last,
                       std::span<const std::byte> payload) = 0;
    // After answers to [first, last), with values or EMPTY.
    virtual void note_answers(Rank shard, std::uint32_t first, std::uint32_t last, const GranuleSet& answered,
                              const GranuleSet& held) = 0;
    // From now on values go to the bucket, as do those that came before.
    virtual void enter(std::span<float> bucket, const std::vector<GranuleSet>& held) = 0;
    // What did not come is zero.
    virtual void end(Rank own_shard, const std::vector<GranuleSet>& held) = 0;

protected:
    // Coordinates of a mean of all ranks that came or did not, not looked at.
    void note_nominal(double coords, bool came, Rank ranks) {
        energies_.received += coords / ranks;
        if (!came) energies_.received_lost += coords / ranks;
    }
    Energies energies_;
};

// Makes the values of an endpoint's ops, all of one kind.
class Values {
public:
    virtual ~Values() = default;
    virtual std::unique_ptr<Contributions> contributions(const OpContext& context, Seq seq,
                                                         const Layout& layout, const Coding& coding,
                                                         std::span<const float> bucket) = 0;
    virtual std::unique_ptr<Reduction> reduction(const OpContext& context, Seq seq, const Layout& layout,
                                                 const Coding& gather, Block memory) = 0;
    virtual std::unique_ptr<Means> means(const OpContext& context, Seq seq, const Layout& layout,
                                         Block memory) = 0;
};

template <typename ItsContributions, typename ItsReduction, typename ItsMeans>
class ValuesOf final : public Values {
public:
    std::unique_ptr<Contributions> contributions(const OpContext& context, Seq seq, const Layout& layout,
                                                 const Coding& coding,
                                                 std::span<const float> bucket) override {
        return std::make_unique<ItsContributions>(context, seq, layout, coding, bucket);
    }
    std::unique_ptr<Reduction> reduction(const OpContext& context, Seq seq, const Layout& layout,
                                         const Coding& gather, Block memory) override {
        return std::make_unique<ItsReduction>(context, seq, layout, gather, std::move(memory));
    }
    std::unique_ptr<Means> means(const OpContext& context, Seq seq, const Layout& layout,
                                 Block memory) override {
        return std::make_unique<ItsMeans>(context, seq, layout, std::move(memory));
    }
};

std::unique_ptr<Values> make_values(wire::Codec codec, bool elided);

// What a reduction takes of memory.
std::size_t owned_floats(wire::Codec codec, const Layout& layout);

}  // namespace tailcut
