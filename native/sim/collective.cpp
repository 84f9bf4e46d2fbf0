#include "sim/collective.hpp"

#include <algorithm>

namespace tailcut::sim {
namespace {

std::uint32_t parts_of(std::uint64_t bytes, std::uint64_t part_bytes) {
    return static_cast<std::uint32_t>(std::max<std::uint64_t>(1, (bytes + part_bytes - 1) / part_bytes));
}
// The size of one of `parts` equal parts.
std::uint64_t share(std::uint64_t bytes, std::uint32_t part, std::uint32_t parts) {
    return bytes * (part + 1) / parts - bytes * part / parts;
}

// Reduce-scatter, then all-gather: at step s every rank sends to the next one the shard that it received at
// step s - 1.
class Ring final : public Collective {
public:
    Ring(Rank ranks, std::uint64_t bucket_bytes, std::uint64_t part_bytes)
        : ranks_(ranks),
          bucket_bytes_(bucket_bytes),
          steps_(2u * (ranks - 1u)),
          parts_(parts_of((bucket_bytes + ranks - 1) / ranks, part_bytes)),
          received_(ranks) {}

    bool enter(Rank rank, std::uint32_t op, std::vector<Message>& out) override {
        received_[rank] = 0;
        for (std::uint32_t part = 0; steps_ > 0 && part < parts_; ++part) send(rank, op, 0, part, out);
        return steps_ == 0;
    }
    bool receive(Rank rank, const Message& message, std::vector<Message>& out) override {
        if (message.step + 1 < steps_) send(rank, message.op, message.step + 1, message.part, out);
        return ++received_[rank] == std::uint64_t{steps_} * parts_;
    }

private:
    void send(Rank rank, std::uint32_t op, std::uint32_t step, std::uint32_t part,
              std::vector<Message>& out) {
        const auto shard =
            static_cast<std::uint32_t>((rank + std::uint64_t{ranks_} * 2 - step % ranks_) % ranks_);
        const std::uint64_t bytes = share(share(bucket_bytes_, shard, ranks_), part, parts_);
        out.push_back({static_cast<Rank>((rank + 1) % ranks_), bytes, op, step, part});
    }

    const std::uint32_t ranks_;
    const std::uint64_t bucket_bytes_;
    const std::uint32_t steps_, parts_;
    std::vector<std::uint64_t> received_;  // by rank, in its op
};

// Parts go up a binary tree to its root, which then has the mean, and down again. Two trees, mirror images of
// each other, take turns by part (as in NCCL's double tree). A rank inside one tree is a leaf of the other,
// so all links are used.
class Tree final : public Collective {
public:
    Tree(Rank ranks, std::uint64_t bucket_bytes, std::uint64_t part_bytes)
        : ranks_(ranks),
          bucket_bytes_(bucket_bytes),
          parts_(parts_of(bucket_bytes, part_bytes)),
          waiting_(ranks, std::vector<std::uint8_t>(parts_)),
          done_(ranks) {}

    bool enter(Rank rank, std::uint32_t op, std::vector<Message>& out) override {
        done_[rank] = 0;
        bool ended = false;
        for (std::uint32_t part = 0; part < parts_; ++part) {
            waiting_[rank][part] = children(place(rank, part));
            if (waiting_[rank][part] == 0) ended = reduced(rank, op, part, out);
        }
        return ended;
    }
    bool receive(Rank rank, const Message& message, std::vector<Message>& out) override {
        if (message.step == kDown) return spread(rank, message.op, message.part, out);
        return --waiting_[rank][message.part] == 0 && reduced(rank, message.op, message.part, out);
    }

private:
    static constexpr std::uint32_t kUp = 0, kDown = 1;

    // Places are numbered from the root, level by level; the function is its own inverse.
    std::uint32_t place(std::uint32_t rank, std::uint32_t part) const {
        return part % 2 == 0 ? rank : ranks_ - 1 - rank;
    }
    std::uint8_t children(std::uint32_t place) const {
        return static_cast<std::uint8_t>((2 * place + 1 < ranks_) + (2 * place + 2 < ranks_));
    }
    // All children have delivered the part.
    bool reduced(Rank rank, std::uint32_t op, std::uint32_t part, std::vector<Message>& out) {
        const std::uint32_t at = place(rank, part);
        if (at == 0) return spread(rank, op, part, out);
        send((at - 1) / 2, op, kUp, part, out);
        return false;
    }
    // The rank has the mean of the part.
    bool spread(Rank rank, std::uint32_t op, std::uint32_t part, std::vector<Message>& out) {
        const std::uint32_t at = place(rank, part);
        for (std::uint32_t child = 2 * at + 1; child < std::min(ranks_, 2 * at + 3); ++child)
            send(child, op, kDown, part, out);
        return ++done_[rank] == parts_;
    }
    void send(std::uint32_t to, std::uint32_t op, std::uint32_t step, std::uint32_t part,
              std::vector<Message>& out) {
        out.push_back(
            {static_cast<Rank>(place(to, part)), share(bucket_bytes_, part, parts_), op, step, part});
    }

    const std::uint32_t ranks_;
    const std::uint64_t bucket_bytes_;
    const std::uint32_t parts_;
    std::vector<std::vector<std::uint8_t>> waiting_;  // by rank and part: children that have not delivered
    std::vector<std::uint32_t> done_;                 // by rank: parts that have a mean
};

}  // namespace

std::unique_ptr<Collective> make_collective(Algorithm algorithm, Rank ranks, std::uint64_t bucket_bytes,
                                            std::uint64_t part_bytes) {
    if (algorithm == Algorithm::kRing) return std::make_unique<Ring>(ranks, bucket_bytes, part_bytes);
    return std::make_unique<Tree>(ranks, bucket_bytes, part_bytes);
}

}  // namespace tailcut::sim
