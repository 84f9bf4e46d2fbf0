// The contributions to the own shard of one op that had not come when it was reduced (rule 9). What comes later
// is kept until the next op of the bucket adds it to its mean. Values are those that the op reduces:
// coordinates with raw, rotated ones with planes.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "codec/blocks.hpp"
#include "protocol/ops/granules.hpp"
#include "protocol/ops/memory.hpp"
#include "protocol/ops/op_context.hpp"
#include "protocol/ops/ownership.hpp"
#include "wire/header.hpp"

namespace tailcut {

// What an op takes in of what has come late. Without one it is all: a record says what it was then (docs/ledger.md).
class LateAdmission {
public:
    virtual ~LateAdmission() = default;
    // Leaves in `due`, which is of a rank's contribution to op `seq`, what op `user` takes in.
    virtual void keep_admitted(Seq user, Seq seq, Rank rank, bool subtracted, GranuleSet& due) const = 0;
};

class LateShard {
public:
    LateShard(const OpContext& context, const Plan& plan);
    virtual ~LateShard() = default;

    const Plan& plan() const { return plan_; }
    std::uint16_t loss_scale_tag = 0;  // of the op

    // Granules [first, last) were reduced to `mean`, which is empty if nobody had delivered them. `arrived` and
    // `abstains` say, by rank, who is in the mean and who will never be. Returns false if there is no memory.
    bool await(std::uint32_t first, std::uint32_t last, const std::vector<GranuleSet>& arrived,
               const std::vector<bool>& abstains, std::span<const float> mean);

    // A late packet; the reason if it is of no use.
    std::optional<wire::Reject> put(const wire::Header& header, std::span<const std::byte> payload);
    // Values of a rank that did not come in a packet: [first, last) of the shard, as far as they are awaited.
    bool put(Rank rank, std::uint32_t first, std::uint32_t last, const float* values);
    // The own contribution, as the bucket has it. Returns false if there is no memory for it.
    virtual bool put_own(std::span<const float> bucket_shard) = 0;
    void abstain(Rank rank) { awaited_[rank] = GranuleSet(granules_); }

    // Whether something has come in [first, last) that no op has used, and that `user` may.
    bool any(Seq user, std::uint32_t first, std::uint32_t last) const;
    // Adds Σ (late - mean)·factor over the ranks, in rank order, to `sum`, which are the coordinates of
    // [first, last). The range is whole blocks with planes. Counts as used by `user`. Returns how many
    // coordinates of contributions were added.
    std::uint64_t add_to(std::span<float> sum, std::uint32_t first, std::uint32_t last, Seq user,
                         float factor);
    // What `user` has used counts as not used (rule 10).
    void give_back(Seq user);
    // Nobody has applied this op: nothing more is awaited, and what later ops have used is subtracted from the next.
    void revoke();
    // What ops before `user` have used will not be given back.
    void settle(Seq user);
    // Nothing more is awaited, and everything has been used for good.
    bool done() const;
    // Coordinates that have come and that no op has used.
    std::uint64_t unused_coords() const;

protected:
    // Decodes a packet without bias into `values`.
    virtual void decode(const wire::Header& header, std::span<const std::byte> payload,
                        std::span<float> values) = 0;
    // Adds values·factor, which are those of [first, last), to coordinates.
    virtual void add_values(std::span<float> values, std::uint32_t first, float factor,
                            std::span<float> sum) = 0;

    const OpContext& context_;
    const Plan plan_;
    const Rank shard_;
    const std::uint32_t granules_;

private:
    // Granules of contributions, by rank.
    struct Parts {
        std::vector<GranuleSet> added, subtracted;
    };
    // What one op has used. An owner reduces ops that its rank has not reached, so it can be several.
    struct Use {
        Seq user;
        Parts parts;
    };
    bool provide(Block& block);
    template <typename Visit>
    void each_admitted(Seq user, Rank rank, bool subtracted, std::uint32_t first, std::uint32_t last,
                       Visit visit) const;
    Parts& used_by(Seq user);

    Block mean_;               // what was sent, without what was carried into it; zero where nobody was
    std::vector<Block> late_;  // by rank
    std::vector<GranuleSet> awaited_;  // by rank: neither in the mean nor here
    Parts due_;                        // what the next op uses
    std::vector<Use> uses_;
    bool revoked_ = false;
};

class RawLateShard final : public LateShard {
public:
    using LateShard::LateShard;
    bool put_own(std::span<const float> bucket_shard) override;

private:
    void decode(const wire::Header& header, std::span<const std::byte> payload,
                std::span<float> values) override;
    void add_values(std::span<float> values, std::uint32_t first, float factor,
                    std::span<float> sum) override;
};

class PlanesLateShard final : public LateShard {
public:
    PlanesLateShard(const OpContext& context, const Plan& plan)
        : LateShard(context, plan), keys_(context.shape.seed, plan.seq, shard_) {}
    bool put_own(std::span<const float> bucket_shard) override;

private:
    void decode(const wire::Header& header, std::span<const std::byte> payload,
                std::span<float> values) override;
    void add_values(std::span<float> values, std::uint32_t first, float factor,
                    std::span<float> sum) override;

    const codec::BlockKeys keys_;
};

// Keeps the accounts of values that are not there.
class ElidedLateShard final : public LateShard {
public:
    using LateShard::LateShard;
    bool put_own(std::span<const float>) override { return put(context_.shape.self, 0, granules_, nullptr); }

private:
    void decode(const wire::Header&, std::span<const std::byte>, std::span<float>) override {}
    void add_values(std::span<float>, std::uint32_t, float, std::span<float>) override {}
};

}  // namespace tailcut
