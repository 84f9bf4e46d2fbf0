// What the reductions of a row have in common, whatever their codec.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "codec/send_order.hpp"
#include "protocol/grid/row_values.hpp"

namespace tailcut {

// A reduction of which nothing is final until the column's mean is put in.
template <typename Flat>
class RowOf : public Flat, public RowReduction {
public:
    using Flat::Flat;

    bool reduce(std::uint32_t first, std::uint32_t last, const std::vector<GranuleSet>& arrived,
                std::vector<Run>& runs) final {
        closed_ += last - first;
        if (first < last && closed_ == granules()) {
            this->save();  // what was offered is summed with the rest
            sum_ = RowSum{this->context_.memory.take(std::size_t{granules()} * kGranule),
                          std::vector<float>(granules()),
                          {}};
            sum(arrived, *sum_);
        }
        runs.insert(runs.end(), final_.begin(), final_.end());
        final_.clear();
        return false;
    }
    bool shared_beyond_group() const final { return true; }
    void put_mean(const RowMean& mean) final { put(mean, final_); }
    void leave_rest_empty() final { put_mean({GranuleSet(granules()), {}}); }

protected:
    std::uint32_t granules() const { return this->plan_.layout.granules(this->shard_); }
    virtual void sum(const std::vector<GranuleSet>& arrived, RowSum& sum) = 0;
    virtual void put(const RowMean& mean, std::vector<Run>& runs) = 0;

private:
    std::uint32_t closed_ = 0;  // granules
    std::vector<Run> final_;    // since the last reduce()
};

// A coded mean as the row sends it on.
class Forwarding {
public:
    // A packet's granules [first, last) of the shard, as far as the row's paths carry them, or EMPTY ones.
    struct Piece {
        std::uint32_t first, last;
        const CodedMean::Packet* packet;  // null: EMPTY
    };
    Forwarding(const RowMean& mean, std::uint32_t granules);

    // All granules of these blocks, in the order of sending: blocks take turns. `most(planes)`: granules of a full packet.
    template <typename Most>
    std::vector<Piece> pieces(const std::vector<codec::BlockSpan>& blocks, Most most) const;

private:
    std::vector<const CodedMean::Packet*> packets_;  // by granule; null: there is none
};

template <typename Most>
std::vector<Forwarding::Piece> Forwarding::pieces(const std::vector<codec::BlockSpan>& blocks,
                                                  Most most) const {
    std::vector<std::vector<Piece>> by_block;
    std::size_t turns = 0;
    bool any = false;
    for (const codec::BlockSpan& block : blocks) {
        auto& pieces = by_block.emplace_back();
        for (std::uint32_t at = block.first_granule(), end; at < block.last_granule(); at = end) {
            const CodedMean::Packet* packet = packets_[at];
            const std::uint32_t limit = packet
                                            ? std::min(block.last_granule(), at + most(packet->head.planes))
                                            : block.last_granule();
            for (end = at + 1; end < limit && packets_[end] == packet;) ++end;
            pieces.push_back({at, end, packet});
            any |= packet != nullptr;
        }
        turns = std::max(turns, pieces.size());
    }
    if (!any) return {{blocks.front().first_granule(), blocks.back().last_granule(), nullptr}};
    std::vector<Piece> in_turns;
    for (std::size_t turn = 0; turn < turns; ++turn)
        for (const auto& pieces : by_block)
            if (turn < pieces.size()) in_turns.push_back(pieces[turn]);
    return in_turns;
}

}  // namespace tailcut
