// The embedded codec in an op (docs/codec.md): stripes are rotated and encoded as they are sent; the owner averages in
// the rotated domain and encodes the mean once; everybody, the owner included, decodes it and rotates back once.
#pragma once

#include "codec/block_sum.hpp"
#include "codec/stripe.hpp"
#include "protocol/values/values.hpp"

namespace tailcut {

// A step is a packet, in the order of sending. A stripe is encoded once, and kept until its packets are delivered.
class PlanesContributions final : public Contributions {
public:
    PlanesContributions(const OpContext& context, const Plan& plan, const Coding& coding,
                        std::span<const float> bucket);

    std::uint32_t steps(Rank shard) const override { return shards_[shard].steps; }
    bool next(Rank shard, const GranuleSet& answered, std::uint32_t& sent, Outgoing& out) override;
    void note_delivered(Rank shard, std::uint32_t step) override;
    void keep(Rank shard, std::uint32_t first, std::uint32_t last) override;
    bool keep_rest() override;

private:
    struct EncodedStripe;
    struct Share {
        codec::SendOrder order;
        std::uint32_t steps;
        std::vector<std::uint32_t> undelivered;  // by stripe: packets
        std::vector<std::shared_ptr<EncodedStripe>>
            encoded;  // by stripe, while something of it is undelivered
    };
    const std::shared_ptr<EncodedStripe>& encoded(Rank shard, std::uint32_t index);
    std::shared_ptr<EncodedStripe> encode(Rank shard, std::uint32_t index);
    void note_residue(Rank shard, const EncodedStripe& encoded);

    const OpContext& context_;
    const Plan plan_;
    const Coding coding_;
    std::span<const float> bucket_;  // empty after keep_rest()
    std::vector<Share> shards_;
};

// A stripe becomes final as a whole: the scale of a block's mean needs all of the block.
class PlanesReduction : public Reduction {
public:
    // `memory`: slots for the packets of each peer's contribution, then for those of the mean.
    PlanesReduction(const OpContext& context, const Plan& plan, const Coding& gather, Block memory);
    static std::size_t mean_floats(const Layout& layout) {
        return layout.shard_stride() / kGranule * codec::kSlotFloats;
    }
    static std::size_t floats(const Layout& layout) { return layout.ranks * mean_floats(layout); }

    void enter(float* bucket_shard, const Coding& gather) override {
        bucket_shard_ = bucket_shard;
        coding_ = gather;
    }
    void offer(const wire::Header& header, std::uint32_t first, std::uint32_t last,
               std::span<const std::byte> payload) override;
    void save() override {}
    void hand_on(const std::vector<GranuleSet>& arrived, const GranuleSet& final) override;
    bool reduce(std::uint32_t first, std::uint32_t last, const std::vector<GranuleSet>& arrived,
                std::vector<Run>& runs) override;
    std::uint32_t packet(Destination to, const Run& run, Outgoing& out) const override;
    void take_over(std::span<const Run> runs, float* bucket_shard) const override;
    void hand_back(bool) override { bucket_shard_ = nullptr; }

    std::size_t mean_floats() const override;
    void compact(Block smaller) override;
    bool compacted() const override { return mean_ == bytes(memory_); }
    bool pooled() const override { return memory_.pooled(); }
    void leave_pool() override { memory_.leave_pool(); }

protected:
    // The own contribution to a stripe, if there is one.
    struct Own {
        codec::RotatedStripe values;
        std::span<const float>
            counts;  // by granule of the stripe: how many contributions it stands for; none: 1 each
    };
    // What there is of a block's mean, and whether it is as good as Gaussian, and of as many contributions everywhere.
    struct Averaged {
        std::uint32_t present;  // granules
        bool gaussian, even;
        bool has_residue = false;  // that of the last mean is in it
    };

    // A packet of a contribution that stands for so many.
    void keep(Rank from, std::uint32_t first, const codec::PlanesHead& head,
              std::span<const std::byte> payload, float count);
    codec::SendOrder send_order(const Coding& coding) const;
    std::uint32_t unit_end(std::uint32_t granule) const override {
        const codec::SendOrder order = send_order(coding_);
        return order.first_granule(order.stripe_of_granule(granule) + 1);
    }
    Own own_stripe(const codec::Stripe& stripe, const std::vector<GranuleSet>& arrived) const;
    // The mean of a stripe that is closed.
    virtual bool reduce_stripe(const codec::Stripe& stripe, const std::vector<GranuleSet>& arrived,
                               std::vector<Run>& runs);
    // Adds to sums and, by granule, to weights. Returns whether the sum is as good as Gaussian.
    bool accumulate_block(const codec::BlockSpan& block, std::span<float> sums, std::span<float> weights,
                          const Own& own, std::size_t index, const std::vector<GranuleSet>& arrived);
    // The mean of a block; notes in present_ what there is.
    Averaged average_block(const codec::BlockSpan& block, std::span<float> mean, const Own& own,
                           std::size_t index, const std::vector<GranuleSet>& arrived);
    // Rule 9: notes who is missing in a block, and adds what is carried from earlier ops, late or taken by coding. Returns
    // whether there was anything. `contributes`: the owner's own contribution is in the mean.
    bool carry_block(const codec::BlockSpan& block, std::span<float> mean, Averaged& averaged,
                     const std::vector<GranuleSet>& arrived, bool contributes);
    void note_mean(const codec::BlockSpan& block, double energy, std::uint32_t present);
    // The packets of a mean, of which present_ says what there is, and all of it as runs. `energies`, and whether what
    // coding takes will be carried, by block.
    void encode(const codec::Stripe& stripe, const codec::RotatedStripe& mean,
                std::span<const double> energies, const std::vector<bool>& residues, std::vector<Run>& runs);
    // The packet of the mean that begins there: returns where its bytes go.
    std::byte* add_packet(std::uint32_t first, const codec::PlanesHead& head);
    std::byte* mean_slot(std::uint32_t granule) const { return mean_ + granule * codec::kSlotBytes; }
    const codec::PlanesHead& head_at(std::uint32_t granule) const { return heads_[packets_[granule]]; }
    // The packet of the mean that begins at this granule.
    std::span<const std::byte> packet_at(std::uint32_t granule) const {
        return {packed_.empty() ? mean_slot(granule) : mean_ + packed_[packets_[granule]],
                head_at(granule).payload_bytes()};
    }
    void apply(const codec::BlockSpan& block, float* bucket_shard) const;
    // After apply(): `mean` is the block before it was coded, and its contents are lost.
    void note_residue(const codec::BlockSpan& block, std::span<float> mean, const codec::Scale& scale);

    const OpContext& context_;
    const Plan plan_;
    const Rank shard_;
    const codec::BlockKeys keys_;
    const codec::Blocks blocks_;
    Coding coding_;
    std::vector<std::uint32_t> open_;  // by stripe: granules that are not closed yet
    GranuleSet present_;               // granules with a mean
    float* bucket_shard_ = nullptr;

private:
    // A packet of a contribution, in its rank's slots.
    struct Piece {
        std::uint32_t first;  // granule of the shard
        std::uint32_t payload_bytes;
        codec::PlanesHead head;
        float count;         // of contributions
        std::uint32_t next;  // of the same rank and block; kNone: the last
    };
    // What is known of one granule's contributions: how many they are, and sums of w and of their errors' squares, as they
    // came and as they were sent.
    struct Account {
        double number = 0, weight = 0, noise = 0, stated_weight = 0, stated_noise = 0;

        void operator+=(const Account& other) {
            number += other.number, weight += other.weight, noise += other.noise;
            stated_weight += other.stated_weight, stated_noise += other.stated_noise;
        }
    };
    static constexpr std::uint32_t kNone = 0xFFFFFFFF;
    static std::byte* bytes(const Block& block) { return reinterpret_cast<std::byte*>(block.data()); }

    std::byte* slot(Rank rank, std::uint32_t granule) const;
    std::vector<codec::PacketRun> cut_at_gaps(const codec::Stripe& stripe, std::vector<Run>& runs) const;

    Block memory_;
    std::byte* mean_;
    std::vector<Piece> pieces_;
    std::vector<std::uint32_t> newest_;     // by block and rank: its last piece
    std::vector<codec::PlanesHead> heads_;  // of the mean's packets
    std::vector<std::uint32_t> packets_;    // by granule: the packet that begins there
    std::vector<std::size_t> packed_;       // by packet, once compacted: where it begins, without slots
};

// Packets are decoded to their place; a block is rotated back when all of it is answered, or at the end.
class PlanesMeans final : public Means {
public:
    // `memory`: the bucket, until there is one.
    PlanesMeans(const OpContext& context, const Plan& plan, Block memory);

    bool place(const wire::Header& header, std::uint32_t first, std::uint32_t last,
               std::span<const std::byte> payload) override;
    bool refine(const wire::Header& header, std::uint32_t first, std::uint32_t last,
                GranuleSet& answered) override;
    void note_answers(Rank shard, std::uint32_t first, std::uint32_t last, const GranuleSet& answered,
                      const GranuleSet& held) override;
    void enter(std::span<float> bucket, const std::vector<GranuleSet>& held, bool own) override;
    void end(const StandIn& stand_in, std::vector<GranuleSet>& answered,
             const std::vector<GranuleSet>& held) override;

    void reopen(std::vector<GranuleSet>& answered) override;
    bool due() const override;
    void each_due(const DueVisit& visit) const override;
    std::uint64_t add_late(std::span<float> bucket, float factor) override;
    void give_back() override;
    void settle() override;
    void forget(std::uint64_t first, std::uint64_t last) override;

private:
    // A packet that came trimmed. It is used if the whole one does not come before the end.
    struct Coarse {
        std::uint32_t first;  // granule of the shard
        codec::PlanesHead head;
        Block payload;
        std::size_t payload_bytes;
        std::uint32_t granules;  // that it delivers
    };
    struct Incoming {
        codec::BlockSum sum;
        std::vector<Coarse> coarse;
        Block z;  // rotated values, from the entry on, while there are some and the block is not complete
        Block
            late;  // after the end: what was filled in; then, if it is due or added, the difference to the mean
        bool done = false;
        bool due = false, added = false, forgotten = false;
    };
    std::span<float> rotated(Rank shard, const codec::BlockSpan& block, Incoming& incoming);
    std::span<float> result(Rank shard, const codec::BlockSpan& block) const;
    void rotate_back(Rank shard, const codec::BlockSpan& block, const codec::BlockSum& sum,
                     std::span<float> z, std::span<float> out) const;
    void complete(Rank shard, const codec::BlockSpan& block, const GranuleSet& held);
    static void add_coarse(const Incoming& incoming, const codec::BlockSpan& block, codec::BlockSum& sum,
                           std::span<float> z);
    bool complete_late(Rank shard, const codec::BlockSpan& block, const StandIn& stand_in,
                       const GranuleSet& answered, const GranuleSet& held);
    void take_in(Rank shard, const codec::BlockSpan& block, const GranuleSet& held);
    void note_damage(const codec::BlockSpan& block, const codec::BlockSum& sum);
    void sample(std::span<const float> own, const float* mean);
    template <typename Visit>
    void each_block(Rank shard, std::uint32_t first, std::uint32_t last, Visit visit);
    template <typename Visit>
    void each_late(Visit visit);

    const OpContext& context_;
    const Plan plan_;
    Block memory_;
    float* base_;
    bool entered_ = false, ended_ = false;
    bool own_ = false;  // the bucket holds the own contribution where no mean has come
    std::vector<std::vector<Incoming>> blocks_;  // by shard
    std::vector<float> ragged_;  // before the entry: the bucket's last block, if it is longer than the bucket
};

}  // namespace tailcut
