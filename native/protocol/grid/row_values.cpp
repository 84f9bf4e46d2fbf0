#include "protocol/grid/row_values.hpp"

#include <algorithm>

#include "protocol/grid/elided_grid_values.hpp"
#include "protocol/grid/row_reductions.hpp"
#include "protocol/values/planes_values.hpp"
#include "protocol/values/raw_values.hpp"

namespace tailcut {
namespace {

class RawRowReduction final : public RowOf<RawReduction> {
public:
    using RowOf::RowOf;

private:
    void sum(const std::vector<GranuleSet>& arrived, RowSum& sum) override {
        const auto sums = sum.values();
        std::fill(sums.begin(), sums.end(), 0.0f);
        for (std::uint32_t first = 0, end; first < granules_; first = end) {
            end = granules_;
            const float count = find_sources(arrived, first, end);
            const std::uint32_t coords = plan_.layout.coords(shard_, first, end);
            const bool empty = sources_.empty() || coords == 0;
            if (!empty) codec::mean_in_order(sources_, 1, coords, sums.data() + first * kGranule);
            energies_ += nominal_energies(coords, empty ? 0 : sources_.size(), plan_.layout.ranks);
            std::fill_n(sum.counts.begin() + first, end - first, empty ? 0 : count);
        }
    }
    void put(const RowMean& mean, std::vector<Run>& runs) override {
        for (std::uint32_t first = 0, end; first < granules_; first = end) {
            end = mean.held.run_end(first, granules_);
            const std::uint32_t at = first * kGranule, coords = plan_.layout.coords(shard_, first, end);
            if (!mean.held.test(first) || coords == 0) {
                put_empty(first, end, runs);
                continue;
            }
            std::copy_n(mean.values.begin() + at, coords, result() + at);
            runs.push_back({first, end, false});
        }
    }
};

class PlanesRowReduction final : public RowOf<PlanesReduction> {
public:
    using RowOf::RowOf;

private:
    void sum(const std::vector<GranuleSet>& arrived, RowSum& sum) override;
    void put(const RowMean& mean, std::vector<Run>& runs) override;
    void put_stripe(const codec::Stripe& stripe, const RowMean& mean, const Forwarding& forwarding,
                    std::vector<Run>& runs);
};

// In the rotated domain, where the mean is taken.
void PlanesRowReduction::sum(const std::vector<GranuleSet>& arrived, RowSum& sum) {
    const auto sums = sum.values();
    std::fill(sums.begin(), sums.end(), 0.0f);
    const codec::SendOrder order = send_order(coding_);
    for (std::uint32_t k = 0; k < order.stripes(); ++k) {
        const codec::Stripe stripe = order.stripe(k);
        const Own own = own_stripe(stripe, arrived);
        for (std::size_t b = 0; b < stripe.blocks.size(); ++b) {
            const codec::BlockSpan& block = stripe.blocks[b];
            const auto counts = std::span(sum.counts).subspan(block.first_granule(), block.length / kGranule);
            sum.gaussian.push_back(
                accumulate_block(block, sums.subspan(block.begin, block.length), counts, own, b, arrived));
        }
    }
    if (sum.gaussian.empty())
        sum.gaussian.push_back(true);  // a shard without coordinates, which has a granule
}

void PlanesRowReduction::put(const RowMean& mean, std::vector<Run>& runs) {
    if (open_.empty()) runs.push_back({0, granules(), true});  // without coordinates
    const Forwarding forwarding(mean, granules());
    const codec::SendOrder order = send_order(coding_);
    for (std::uint32_t k = 0; k < order.stripes(); ++k) {
        put_stripe(order.stripe(k), mean, forwarding, runs);
        open_[k] = 0;
    }
}

void PlanesRowReduction::put_stripe(const codec::Stripe& stripe, const RowMean& mean,
                                    const Forwarding& forwarding, std::vector<Run>& runs) {
    const auto most = [&](int planes) {
        return context_.granules(context_.gather_limits, {planes, coding_.whole});
    };
    std::vector<double> energies(stripe.blocks.size());
    for (const Forwarding::Piece& piece : forwarding.pieces(stripe.blocks, most)) {
        runs.push_back({piece.first, piece.last, !piece.packet});
        if (!piece.packet) continue;
        const auto& [begin, head] = *piece.packet;
        const std::span<const std::byte> payload{
            reinterpret_cast<const std::byte*>(mean.coded->slots.data()) + begin * codec::kSlotBytes,
            head.payload_bytes()};
        const std::uint32_t length = piece.last - piece.first;
        add_packet(piece.first, codec::slice(head, payload, piece.first - begin, length, head.planes,
                                             mean_slot(piece.first)));
        present_.set(piece.first, piece.last);
        const std::uint32_t b = blocks_.of(piece.first * kGranule).index - stripe.blocks.front().index;
        energies[b] += double{head.sigma} * head.sigma * (length * kGranule);
    }
    for (std::size_t b = 0; b < stripe.blocks.size(); ++b) {
        const codec::BlockSpan& block = stripe.blocks[b];
        note_mean(block, energies[b], present_.count(block.first_granule(), block.last_granule()));
        energies_.mean_quantized += energies[b] * (mean.sums_noise + mean.mean_noise);
        energies_.received_trimmed += energies[b] * mean.trimmed;
        if (bucket_shard_) apply(block, bucket_shard_);
    }
}

}  // namespace

Forwarding::Forwarding(const RowMean& mean, std::uint32_t granules) : packets_(granules) {
    if (!mean.coded) return;
    for (const CodedMean::Packet& packet : mean.coded->packets)
        if (mean.held.test(packet.first))
            std::fill_n(packets_.begin() + packet.first, packet.head.granules, &packet);
}

std::unique_ptr<Values> make_row_values(wire::Codec codec, bool elided) {
    if (elided) return make_elided_row_values(codec);
    if (codec == wire::Codec::kPlanes)
        return std::make_unique<ValuesOf<PlanesContributions, PlanesRowReduction, PlanesMeans>>();
    return std::make_unique<ValuesOf<RawContributions, RawRowReduction, RawMeans>>();
}

}  // namespace tailcut
