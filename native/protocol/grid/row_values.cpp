#include "protocol/grid/row_values.hpp"

#include <algorithm>

#include "protocol/values/elided_values.hpp"
#include "protocol/values/planes_values.hpp"
#include "protocol/values/raw_values.hpp"

namespace tailcut {
namespace {

// A reduction of which nothing is final until the column's mean is put in.
template <typename Flat>
class RowOf : public Flat, public RowReduction {
public:
    using Flat::Flat;

    bool reduce(std::uint32_t first, std::uint32_t last, const std::vector<GranuleSet>& arrived,
                std::vector<Run>& runs) final {
        closed_ += last - first;
        if (first < last && closed_ == granules()) {
            sum_ = RowSum{this->context_.memory.take(std::size_t{granules()} * kGranule),
                          std::vector<float>(granules())};
            this->save();  // what was offered is summed with the rest
            sum(arrived, sum_->values(), sum_->weights);
        }
        runs.insert(runs.end(), final_.begin(), final_.end());
        final_.clear();
        return false;
    }
    bool shared_beyond_group() const final { return true; }
    void put_mean(std::span<const float> mean, const GranuleSet& held,
                  std::span<const std::uint8_t> planes) final {
        put(mean, held, planes, final_);
    }
    void give_up() final { put({}, GranuleSet(granules()), {}, final_); }

protected:
    std::uint32_t granules() const { return this->layout_.granules(this->shard_); }
    virtual void sum(const std::vector<GranuleSet>& arrived, std::span<float> sums,
                     std::span<float> weights) = 0;
    virtual void put(std::span<const float> mean, const GranuleSet& held,
                     std::span<const std::uint8_t> planes, std::vector<Run>& runs) = 0;

private:
    std::uint32_t closed_ = 0;  // granules
    std::vector<Run> final_;    // since the last reduce()
};

class RawRowReduction final : public RowOf<RawReduction> {
public:
    using RowOf::RowOf;

private:
    void sum(const std::vector<GranuleSet>& arrived, std::span<float> sums,
             std::span<float> weights) override {
        std::fill(sums.begin(), sums.end(), 0.0f);
        for (std::uint32_t first = 0, end; first < granules_; first = end) {
            end = granules_;
            const float weight = find_sources(arrived, first, end);
            const std::uint32_t coords = layout_.coords(shard_, first, end);
            const bool empty = sources_.empty() || coords == 0;
            if (!empty) codec::mean_in_order(sources_, 1, coords, sums.data() + first * kGranule);
            energies_ += nominal_energies(coords, empty ? 0 : sources_.size(), layout_.ranks);
            std::fill_n(weights.begin() + first, end - first, empty ? 0 : weight);
        }
    }
    void put(std::span<const float> mean, const GranuleSet& held, std::span<const std::uint8_t>,
             std::vector<Run>& runs) override {
        for (std::uint32_t first = 0, end; first < granules_; first = end) {
            end = held.run_end(first, granules_);
            const std::uint32_t at = first * kGranule, coords = layout_.coords(shard_, first, end);
            if (!held.test(first) || coords == 0) {
                put_empty(first, end, runs);
                continue;
            }
            std::copy_n(mean.begin() + at, coords, result() + at);
            runs.push_back({first, end, false});
        }
    }
};

// In the rotated domain, where the mean is taken.
class PlanesRowReduction final : public RowOf<PlanesReduction> {
public:
    using RowOf::RowOf;

private:
    void sum(const std::vector<GranuleSet>& arrived, std::span<float> sums,
             std::span<float> weights) override;
    void put(std::span<const float> mean, const GranuleSet& held, std::span<const std::uint8_t> planes,
             std::vector<Run>& runs) override;
};

void PlanesRowReduction::sum(const std::vector<GranuleSet>& arrived, std::span<float> sums,
                             std::span<float> weights) {
    std::fill(sums.begin(), sums.end(), 0.0f);
    std::fill(weights.begin(), weights.end(), 0.0f);
    const codec::SendOrder order = send_order(coding_);
    for (std::uint32_t k = 0; k < order.stripes(); ++k) {
        const codec::Stripe stripe = order.stripe(k);
        const codec::RotatedStripe own = own_stripe(stripe, arrived);
        for (std::size_t b = 0; b < stripe.blocks.size(); ++b) {
            const codec::BlockSpan& block = stripe.blocks[b];
            accumulate_block(block, sums.subspan(block.begin, block.length),
                             weights.subspan(block.first_granule(), block.length / kGranule), own, b,
                             arrived);
        }
    }
}

// Every row encodes the same mean, so it may only depend on that: nothing is known of the weights behind it, and its planes
// are those of the first of the column's owners who has said a number.
void PlanesRowReduction::put(std::span<const float> means, const GranuleSet& held,
                             std::span<const std::uint8_t> planes, std::vector<Run>& runs) {
    if (open_.empty()) runs.push_back({0, granules(), true});  // without coordinates
    present_ = held;
    const codec::SendOrder order = send_order(coding_);
    for (std::uint32_t k = 0; k < order.stripes(); ++k) {
        Coding coding = coding_;
        for (std::uint32_t g = order.first_granule(k);
             g < std::min<std::size_t>(order.first_granule(k + 1), planes.size()); ++g)
            if (planes[g] > 0) {
                coding.planes = planes[g];
                break;
            }
        const codec::Stripe stripe = send_order(coding).stripe(k);
        const std::uint32_t first = stripe.first_granule(), last = stripe.last_granule();
        const std::size_t coords = std::size_t{last - first} * kGranule;
        codec::RotatedStripe mean{stripe.blocks, grown(context_.scratch.stripe, coords), {}};
        for (std::size_t b = 0; b < stripe.blocks.size(); ++b) {
            const codec::BlockSpan& block = stripe.blocks[b];
            const std::uint32_t present = held.count(block.first_granule(), block.last_granule());
            const auto z = mean.block(b);
            if (present > 0) std::copy_n(means.begin() + block.begin, block.length, z.begin());
            note_mean(block, z, present);
            mean.scales.push_back(codec::scale_of_mean(z, std::size_t{present} * kGranule, false, false));
        }
        encode(stripe, mean, coding.planes, runs);
        open_[k] = 0;
    }
}

template <typename Elided>
class ElidedRowOf : public RowOf<Elided> {
public:
    using RowOf<Elided>::RowOf;

private:
    // Contributions without what coarse ones weigh less.
    void sum(const std::vector<GranuleSet>& arrived, std::span<float>, std::span<float> weights) final {
        if (this->layout_.length(this->shard_) == 0) return;
        this->note(0, this->granules(), arrived);
        for (std::uint32_t g = 0; g < weights.size(); ++g)
            weights[g] = static_cast<float>(std::count_if(
                arrived.begin(), arrived.end(), [&](const GranuleSet& set) { return set.test(g); }));
    }
};

class ElidedRawRowReduction final : public ElidedRowOf<ElidedRawReduction> {
public:
    using ElidedRowOf::ElidedRowOf;

private:
    void put(std::span<const float>, const GranuleSet& held, std::span<const std::uint8_t>,
             std::vector<Run>& runs) override {
        cut(0, granules(), {held}, runs);
    }
};

class ElidedPlanesRowReduction final : public ElidedRowOf<ElidedPlanesReduction> {
public:
    using ElidedRowOf::ElidedRowOf;

private:
    void put(std::span<const float>, const GranuleSet& held, std::span<const std::uint8_t>,
             std::vector<Run>& runs) override {
        const codec::SendOrder order = send_order();
        if (order.stripes() == 0) runs.push_back({0, granules(), true});  // without coordinates
        for (std::uint32_t k = 0; k < order.stripes(); ++k) cut(order.stripe(k), {held}, true, runs);
    }
};

}  // namespace

std::unique_ptr<Values> make_row_values(wire::Codec codec, bool elided) {
    const bool planes = codec == wire::Codec::kPlanes;
    if (elided && planes)
        return std::make_unique<ValuesOf<ElidedPlanesContributions, ElidedPlanesRowReduction, ElidedMeans>>();
    if (elided)
        return std::make_unique<ValuesOf<ElidedRawContributions, ElidedRawRowReduction, ElidedMeans>>();
    if (planes) return std::make_unique<ValuesOf<PlanesContributions, PlanesRowReduction, PlanesMeans>>();
    return std::make_unique<ValuesOf<RawContributions, RawRowReduction, RawMeans>>();
}

}  // namespace tailcut
