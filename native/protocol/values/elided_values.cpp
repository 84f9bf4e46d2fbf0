#include "protocol/values/elided_values.hpp"

#include <algorithm>
#include <array>

#include "codec/centroids.hpp"
#include "protocol/carry/carry.hpp"
#include "protocol/values/planes_values.hpp"

namespace tailcut {
namespace {

constexpr std::array<std::byte, 1 << 16> kNothing{};

void put_planes(const codec::PlanesHead& head, std::uint32_t first, std::uint32_t shard_len, Outgoing& out) {
    codec::put_run(head, first, shard_len, out.header);
    out.payload = nothing(head.payload_bytes());
}

// The end of the run that begins with `first` and in which every granule came from some rank, or every
// granule from none.
std::uint32_t run_end(const std::vector<GranuleSet>& arrived, std::uint32_t first, std::uint32_t last,
                      bool& empty) {
    const auto came = [&](std::uint32_t g) {
        return std::any_of(arrived.begin(), arrived.end(),
                           [&](const GranuleSet& set) { return set.test(g); });
    };
    empty = !came(first);
    std::uint32_t end = first;
    while (end < last && came(end) != empty) {
        std::uint32_t next = last;
        for (const GranuleSet& set : arrived) {  // as far as one rank has all, or none has any
            const std::uint32_t same = set.run_end(end, last);
            if (set.test(end) && !empty) {
                next = same;
                break;
            }
            next = std::min(next, same);
        }
        end = next;
    }
    return end;
}

// Whether the same number of ranks delivered each granule of a block.
bool even(const std::vector<GranuleSet>& arrived, const codec::BlockSpan& block) {
    const std::uint32_t first = block.first_granule(), last = block.last_granule();
    if (std::all_of(arrived.begin(), arrived.end(),
                    [&](const GranuleSet& set) { return set.run_end(first, last) == last; }))
        return true;
    const auto ranks = [&](std::uint32_t g) {
        return std::count_if(arrived.begin(), arrived.end(),
                             [&](const GranuleSet& set) { return set.test(g); });
    };
    for (std::uint32_t g = first + 1; g < last; ++g)
        if (ranks(g) != ranks(first)) return false;
    return true;
}

}  // namespace

std::span<const std::byte> nothing(std::size_t bytes) { return std::span(kNothing).first(bytes); }

void ElidedRawContributions::put_values(Rank, std::uint32_t, std::uint32_t coords, Outgoing& out) const {
    out.header.flags = 0;
    out.payload = nothing(coords * sizeof(float));
}

codec::SendOrder ElidedPlanesContributions::order(Rank shard) const {
    const codec::PacketLimits& limits = context_.limits[plan_.owner(shard)];
    return {plan_.layout.length(shard), context_.granules(limits, coding_)};
}

bool ElidedPlanesContributions::next(Rank shard, const GranuleSet& answered, std::uint32_t& sent,
                                     Outgoing& out) {
    const codec::SendOrder order = this->order(shard);
    const Place place{shard, order.stripe_of_packet(sent)};
    if (place_ != place) {
        place_ = place;
        stripe_ = order.stripe(place.stripe);
    }
    const codec::PacketRun& run = stripe_.packets[sent++ - order.first_packet(place.stripe)];
    const codec::BlockSpan& block = stripe_.blocks[run.block];
    if (answered.any(block.first_granule(), block.last_granule())) return false;
    put_planes({run.last - run.first, coding_.planes, 1.0f, 0, 0}, run.first, plan_.layout.length(shard),
               out);
    out.header.flags = 0;
    return true;
}

void ElidedReduction::note(std::uint32_t first, std::uint32_t last, const std::vector<GranuleSet>& arrived) {
    if (abstains_ && context_.carries(plan_)) {
        context_.carry.await(context_, plan_, loss_scale_tag, first, last, arrived, *abstains_, {});
        if (context_.carry.any(plan_, first, last))
            context_.carry.add_to(plan_, loss_scale_tag, first, last, {});
    }
    for (std::uint32_t end; first < last; first = end) {
        end = last;
        std::size_t came = 0;
        for (const GranuleSet& set : arrived) end = set.run_end(first, end), came += set.test(first);
        energies_ += nominal_energies(plan_.layout.coords(shard_, first, end), came, plan_.layout.ranks);
    }
}

void ElidedMeans::end(const StandIn&, std::vector<GranuleSet>&, const std::vector<GranuleSet>& held) {
    for (Rank shard = 0; shard < plan_.layout.ranks; ++shard)
        for (std::uint32_t g = 0, last; shard != plan_.own_shard() && g < plan_.layout.granules(shard);
             g = last) {
            last = held[shard].run_end(g, plan_.layout.granules(shard));
            note_nominal(plan_.layout.coords(shard, g, last), held[shard].test(g), plan_.layout.ranks);
        }
}

void ElidedRawReduction::cut(std::uint32_t first, std::uint32_t last, const std::vector<GranuleSet>& arrived,
                             std::vector<Run>& runs) const {
    const bool without_coords = plan_.layout.coords(shard_, first, last) == 0;
    for (std::uint32_t end; first < last; first = end) {
        bool empty = false;
        end = run_end(arrived, first, last, empty);
        runs.push_back({first, end, empty || without_coords});
    }
}

std::uint32_t ElidedRawReduction::packet(Destination to, const Run& run, Outgoing& out) const {
    const std::uint32_t most = context_.granules(context_.limits_to(to), {});
    const std::uint32_t granules = std::min(run.last - run.first, most);
    const std::uint32_t coords = plan_.layout.coords(shard_, run.first, run.first + granules);
    out.header.count = static_cast<std::uint16_t>(coords);
    out.payload = nothing(coords * sizeof(float));
    return granules;
}

ElidedPlanesReduction::ElidedPlanesReduction(const OpContext& context, const Plan& plan, const Coding& gather,
                                             Block memory)
    : ElidedReduction(context, plan, std::move(memory)),
      coding_(gather),
      lengths_(plan.layout.granules(shard_)) {
    const codec::SendOrder order = send_order();
    for (std::uint32_t k = 0; k < order.stripes(); ++k)
        open_.push_back(order.first_granule(k + 1) - order.first_granule(k));
    gains_.resize(order.stripes());
}

std::size_t ElidedPlanesReduction::mean_floats() const { return PlanesReduction::mean_floats(plan_.layout); }

codec::SendOrder ElidedPlanesReduction::send_order() const {
    return {plan_.layout.length(shard_), context_.granules(context_.gather_limits, coding_)};
}

bool ElidedPlanesReduction::reduce(std::uint32_t first, std::uint32_t last,
                                   const std::vector<GranuleSet>& arrived, std::vector<Run>& runs) {
    if (open_.empty()) {  // a shard without coordinates
        runs.push_back({first, last, true});
        return false;
    }
    const codec::SendOrder order = send_order();
    for (std::uint32_t g = first; g < last;) {
        const std::uint32_t index = order.stripe_of_granule(g);
        const std::uint32_t end = std::min(last, order.first_granule(index + 1));
        open_[index] -= end - g;
        g = end;
        if (open_[index] == 0) reduce_stripe(order.stripe(index), arrived, runs);
    }
    return false;
}

void ElidedPlanesReduction::reduce_stripe(const codec::Stripe& stripe, const std::vector<GranuleSet>& arrived,
                                          std::vector<Run>& runs) {
    note(stripe.first_granule(), stripe.last_granule(), arrived);
    cut(stripe, arrived, needs_gains(stripe, arrived), runs);
}

void ElidedPlanesReduction::note(std::uint32_t first, std::uint32_t last,
                                 const std::vector<GranuleSet>& arrived) {
    const Energies before = energies_;
    ElidedReduction::note(first, last, arrived);
    // One of the contributions is the owner's own, which is exact: the error of a mean of m is 1/w - 1 of m -
    // 1 of m contributions. Without another one it is not known how many planes the others send.
    const double mean = energies_.mean - before.mean, sampled = energies_.sampled - before.sampled;
    const double contributed = energies_.contributed - before.contributed;
    if (contributed > sampled)
        energies_.quantized += codec::nominal_noise(sent_planes_) * mean * (1 - sampled / contributed);
    energies_.planes += contributed * sent_planes_;
    energies_.mean_quantized += codec::nominal_noise(coding_.planes) * mean;
    if (!residue.empty() && arrived[context_.shape.self].any(first, last))
        energies_.mean_carried += codec::nominal_noise(coding_.planes) * mean;
}

bool ElidedPlanesReduction::needs_gains(const codec::Stripe& stripe,
                                        const std::vector<GranuleSet>& arrived) const {
    return coding_.planes < codec::kMeasuredBits ||
           !std::all_of(
               stripe.blocks.begin(), stripe.blocks.end(),
               [&](const codec::BlockSpan& block) { return even(arrived, block); });
}

// As in PlanesReduction: packets are in the order of sending, and are cut where nobody has delivered.
void ElidedPlanesReduction::cut(const codec::Stripe& stripe, const std::vector<GranuleSet>& arrived,
                                bool gains, std::vector<Run>& runs) {
    const std::uint32_t first = stripe.first_granule(), last = stripe.last_granule();
    bool empty = false;
    if (run_end(arrived, first, last, empty) == last && empty) {
        runs.push_back({first, last, true});
        return;
    }
    gains_[send_order().stripe_of_granule(first)] = gains;
    for (const codec::PacketRun& whole : stripe.packets)
        for (std::uint32_t at = whole.first, end; at < whole.last; at = end) {
            end = run_end(arrived, at, whole.last, empty);
            runs.push_back({at, end, empty});
            lengths_[at] = static_cast<std::uint16_t>(end - at);
        }
}

codec::PlanesHead ElidedPlanesReduction::head_at(std::uint32_t granule) const {
    const bool gains = gains_[send_order().stripe_of_granule(granule)];
    return {lengths_[granule], coding_.planes, 1.0f, gains ? codec::kNominalGain : std::uint16_t{0}, 0};
}

std::uint32_t ElidedPlanesReduction::packet(Destination, const Run& run, Outgoing& out) const {
    put_planes(head_at(run.first), run.first, plan_.layout.length(shard_), out);
    return lengths_[run.first];
}

}  // namespace tailcut
