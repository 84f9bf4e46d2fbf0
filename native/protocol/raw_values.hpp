// fp32 as it is: packets point into the bucket, runs become final granule by granule.
#pragma once

#include "protocol/values.hpp"

namespace tailcut {

class RawContributions : public Contributions {
public:
    // `weights`: in a column, by granule of the bucket.
    RawContributions(const OpContext& context, Seq seq, const Layout& layout, std::span<const float> bucket,
                     std::span<const float> weights)
        : context_(context), seq_(seq), layout_(layout), bucket_(bucket), weights_(weights) {}

    std::uint32_t steps(Rank shard) const override { return layout_.granules(shard); }
    bool next(Rank shard, const GranuleSet& answered, std::uint32_t& sent, Outgoing& out) override;
    void retract(const Outgoing&) override {}
    std::uint32_t first_unseen(Rank, std::uint32_t sent) const override { return sent; }

protected:
    virtual void put_values(std::uint64_t at, std::uint32_t coords, Outgoing& out) const;

    const OpContext& context_;
    const Seq seq_;
    const Layout layout_;

private:
    const std::span<const float> bucket_, weights_;
};

class RawReduction final : public Reduction {
public:
    // `memory` holds one stride per rank: the peers' contributions, then the mean. Without it all runs are empty.
    RawReduction(const OpContext& context, Seq seq, const Layout& layout, Block memory);
    static std::size_t floats(const Layout& layout) { return layout.shard_stride() * layout.ranks; }

    void enter(float* bucket_shard, const Coding&, std::span<const float> weights) override;
    void offer(const wire::Header& header, std::uint32_t first, std::uint32_t last,
               std::span<const std::byte> payload) override;
    void save() override;
    bool settle(std::uint32_t first, std::uint32_t last, const std::vector<GranuleSet>& arrived,
                std::vector<Run>& runs) override;
    void sum(const std::vector<GranuleSet>& arrived, std::span<float> sums,
             std::span<float> weights) override;
    void conclude(std::span<const float> means, const GranuleSet& held, std::span<const std::uint8_t>,
                  std::vector<Run>& runs) override;
    std::uint32_t packet(Rank peer, const Run& run, Outgoing& out) const override;
    void take_over(std::span<const Run> runs, float* bucket_shard) const override;
    void leave(bool needed) override;

    std::size_t mean_floats() const override { return layout_.shard_stride(); }
    void compact(Block smaller) override;
    bool compacted() const override { return mean_ == memory_.data(); }
    bool pooled() const override { return memory_.pooled(); }
    void leave_pool() override { memory_.leave_pool(); }

private:
    // A contribution in the receive buffer. What is reduced at once need not be copied.
    struct Offer {
        Rank from = 0;
        std::uint32_t first = 0, last = 0;
        std::span<const std::byte> payload;
    };
    float* slot(Rank rank) const;
    const float* source(Rank rank, std::uint32_t granule) const;
    float* weights_of(Rank rank) { return weights_.data() + std::size_t{rank} * granules_; }
    float find_sources(const std::vector<GranuleSet>& arrived, std::uint32_t first, std::uint32_t& last);
    float* result() const { return bucket_shard_ ? bucket_shard_ : mean_; }

    const OpContext& context_;
    const Layout layout_;
    const Rank shard_;
    const std::uint32_t granules_;
    Block memory_;
    float* mean_;
    float* bucket_shard_ = nullptr;
    Offer offer_;
    std::vector<float> weights_;         // in a column: by rank and granule
    std::vector<const float*> sources_;  // scratch of find_sources()
};

class RawMeans final : public Means {
public:
    // `memory`: the bucket, until there is one.
    RawMeans(const Layout& layout, Block memory)
        : layout_(layout), memory_(std::move(memory)), base_(memory_.data()) {}

    void place(const wire::Header& header, std::uint32_t first, std::uint32_t last,
               std::span<const std::byte> payload) override;
    void settle(Rank, std::uint32_t, std::uint32_t, const GranuleSet&, const GranuleSet&) override {}
    void enter(std::span<float> bucket, const std::vector<GranuleSet>& held) override;
    void finish(Rank own_shard, const std::vector<GranuleSet>& held) override;

private:
    const Layout layout_;
    Block memory_;
    float* base_;
};

}  // namespace tailcut
