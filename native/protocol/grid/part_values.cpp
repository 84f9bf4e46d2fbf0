#include "protocol/grid/part_values.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "protocol/grid/parts.hpp"
#include "protocol/grid/stands_for.hpp"

namespace tailcut {
namespace {

std::byte* slot_of(const CodedMean& mean, std::uint64_t granule) {
    return reinterpret_cast<std::byte*>(mean.slots.data()) + granule * codec::kSlotBytes;
}

}  // namespace

// ---- contributions ----------------------------------------------------------------------------------------

PartContributions::PartContributions(const ColumnOps& ops, const OpContext& context, const Plan& plan,
                                     const Coding& coding, std::span<const float> bucket)
    : context_(context),
      plan_(plan),
      coding_(coding),
      sum_(ops.at(plan.seq).sum),
      bucket_(bucket),
      first_steps_(plan.layout.ranks),
      coded_(plan.layout.ranks) {
    for (Rank shard = 0; shard < plan.layout.ranks; ++shard) {
        auto& firsts = first_steps_[shard];
        firsts.push_back(0);
        for (std::uint32_t k = 0; k < order(shard).stripes(); ++k)
            firsts.push_back(firsts.back() +
                             static_cast<std::uint32_t>(this->plan(shard, k).stripe.packets.size()));
        if (firsts.back() == 0) firsts.push_back(1);  // a shard without coordinates is announced
    }
}

codec::SendOrder PartContributions::order(Rank shard) const {
    const codec::PacketLimits& limits = context_.limits[plan_.owner(shard)];
    return {plan_.layout.length(shard), context_.granules(limits, coding_)};
}

PartContributions::CodedStripe PartContributions::plan(Rank shard, std::uint32_t index) const {
    const codec::PacketLimits& limits = context_.limits[plan_.owner(shard)];
    const float* counts = sum_.counts.data() + plan_.layout.begin(shard) / kGranule;
    CodedStripe coded;
    coded.index = index;
    coded.stripe = stripe_of(spans_of(plan_.layout, shard, order(shard).first_granule(index),
                                      order(shard).first_granule(index + 1), counts),
                             context_.granules(limits, coding_));
    for (const codec::BlockSpan& span : coded.stripe.blocks)
        coded.counts.push_back(counts[span.first_granule()]);
    return coded;
}

std::uint32_t PartContributions::stripe_of_step(Rank shard, std::uint32_t step) const {
    const auto& firsts = first_steps_[shard];
    return static_cast<std::uint32_t>(std::upper_bound(firsts.begin(), firsts.end(), step) - firsts.begin() -
                                      1);
}

bool PartContributions::next(Rank shard, const GranuleSet& answered, std::uint32_t& sent, Outgoing& out) {
    const std::uint32_t index = stripe_of_step(shard, sent);
    auto& coded = coded_[shard];
    if (!coded || coded->index != index) {
        auto fresh = std::make_shared<CodedStripe>(plan(shard, index));
        code(shard, *fresh);
        coded = std::move(fresh);
    }
    const auto keeper = coded;
    const codec::PacketRun& run = keeper->stripe.packets[sent - first_steps_[shard][index]];
    if (++sent == steps(shard)) coded.reset();
    if (answered.any(run.first, run.last)) return false;

    codec::PlanesHead head = keeper->heads[run.block];
    head.granules = run.last - run.first;
    codec::put_run(head, run.first, plan_.layout.length(shard), out.header);
    put_count(keeper->counts[run.block], out.header);
    out.header.flags = std::isnan(head.sigma) ? wire::kNonFinite : 0;
    out.payload = payload(*keeper, run, head);
    out.keeper = keeper;
    return true;
}

bool PartContributions::gaussian(Rank shard, const codec::BlockSpan& span) const {
    const auto at = static_cast<std::uint32_t>(plan_.layout.begin(shard)) + span.begin;
    return sum_.gaussian[codec::Blocks(plan_.layout.bucket_len).of(at).index];
}

// The row's mean of each span. Where the row has nothing, one plane of zeros says so.
void PartContributions::code(Rank shard, CodedStripe& coded) {
    const codec::Stripe& stripe = coded.stripe;
    const std::uint32_t first = stripe.first_granule(), last = stripe.last_granule();
    codec::RotatedStripe mean{
        stripe.blocks, grown(context_.scratch.stripe, std::size_t{last - first} * kGranule), {}};
    for (std::size_t b = 0; b < stripe.blocks.size(); ++b) {
        const codec::BlockSpan& span = stripe.blocks[b];
        const float count = coded.counts[b];
        const auto z = mean.block(b);
        const auto sums = bucket_.subspan(plan_.layout.begin(shard) + span.begin, span.length);
        std::transform(sums.begin(), sums.end(), z.begin(),
                       [&](float sum) { return count > 0 ? sum / count : 0; });
        mean.scales.push_back(codec::scale_of_mean(z, count > 0 ? z.size() : 0, gaussian(shard, span), true));
    }
    std::vector<codec::PacketRun> runs;
    std::copy_if(stripe.packets.begin(), stripe.packets.end(), std::back_inserter(runs),
                 [&](const codec::PacketRun& run) { return coded.counts[run.block] > 0; });
    const std::size_t floats = std::size_t{last - first} * codec::kSlotFloats;
    coded.slots = context_.memory.take(floats);
    if (runs.size() < stripe.packets.size()) std::fill_n(coded.slots.data(), floats, 0.0f);
    const codec::BlockKeys keys(context_.shape.seed, plan_.seq, shard);
    for (const codec::CodedBlock& block : codec::encode_stripe(
             mean, runs, keys, coding_.planes, reinterpret_cast<std::byte*>(coded.slots.data()))) {
        const std::size_t b = coded.heads.size();
        coded.heads.push_back(coded.counts[b] > 0 ? block.head : codec::PlanesHead{0, 1, 0, 0, 0});
        const double energy = double{block.head.sigma} * block.head.sigma * stripe.blocks[b].length;
        energies_.sent_noise += energy * block.noise;
        energies_.sent_nominal += energy * codec::nominal_noise(coding_.planes);
    }
}

std::span<const std::byte> PartContributions::payload(const CodedStripe& coded, const codec::PacketRun& run,
                                                      const codec::PlanesHead& head) const {
    const std::size_t at = std::size_t{run.first - coded.stripe.first_granule()} * codec::kSlotBytes;
    return {reinterpret_cast<const std::byte*>(coded.slots.data()) + at, head.payload_bytes()};
}

void PartContributions::retract(const Outgoing& out) {
    coded_[out.header.shard] = std::static_pointer_cast<const CodedStripe>(out.keeper);
}

// ---- the mean ---------------------------------------------------------------------------------------------

void PartReduction::offer(const wire::Header& header, std::uint32_t first, std::uint32_t,
                          std::span<const std::byte> payload) {
    if (const float count = count_of(header); count > 0)
        keep(header.source, first, codec::head_of(header), payload, count);
}

// The own sums as they are, with the scale of the mean that they make.
PlanesReduction::Own PartReduction::own_sums(const codec::Stripe& stripe,
                                             const std::vector<GranuleSet>& arrived) const {
    const std::uint32_t first = stripe.first_granule(), last = stripe.last_granule();
    if (!bucket_shard_ || !arrived[context_.shape.self].any(first, last)) return {};
    const RowSum& sum = ops_.at(plan_.seq).sum;
    const auto origin = static_cast<std::uint32_t>(plan_.layout.begin(shard_) / kGranule);
    const std::span<const float> counts = std::span(sum.counts).subspan(origin + first, last - first);
    Own own{{stripe.blocks, {bucket_shard_ + first * kGranule, (last - first) * kGranule}, {}}, counts};
    for (std::size_t b = 0; b < stripe.blocks.size(); ++b) {
        const codec::BlockSpan& block = stripe.blocks[b];
        double squares = 0, came = 0;
        for (std::uint32_t g = block.first_granule(); g < block.last_granule(); ++g) {
            const double count = counts[g - first];
            if (count == 0) continue;
            squares += codec::sum_of_squares({bucket_shard_ + g * kGranule, kGranule}) / (count * count);
            came += kGranule;
        }
        codec::Scale scale;
        if (came > 0) scale.sigma = static_cast<float>(std::sqrt(squares / came));
        const std::vector<codec::BlockSpan> spans =
            spans_of(plan_.layout, shard_, block.first_granule(), block.last_granule());
        scale.unit = 1;
        scale.gaussian = std::all_of(spans.begin(), spans.end(), [&](const codec::BlockSpan& span) {
            return sum
                .gaussian[codec::Blocks(plan_.layout.bucket_len).of(origin * kGranule + span.begin).index];
        });
        own.values.scales.push_back(scale);
    }
    return own;
}

bool PartReduction::reduce_stripe(const codec::Stripe& stripe, const std::vector<GranuleSet>& arrived,
                                  std::vector<Run>& runs) {
    const std::uint32_t first = stripe.first_granule(), last = stripe.last_granule();
    const std::size_t coords = std::size_t{last - first} * kGranule;
    const Own own = own_sums(stripe, arrived);
    const codec::RotatedStripe blocks{stripe.blocks, grown(context_.scratch.stripe, coords), {}};
    std::vector<Averaged> averaged;
    for (std::size_t b = 0; b < stripe.blocks.size(); ++b)
        averaged.push_back(average_block(stripe.blocks[b], blocks.block(b), own, b, arrived));

    const codec::Stripe spans = stripe_of(spans_of(plan_.layout, shard_, first, last),
                                          context_.granules(context_.gather_limits, coding_));
    codec::RotatedStripe mean{spans.blocks, blocks.z, {}};
    std::vector<double> energies;
    for (std::size_t s = 0, b = 0; s < spans.blocks.size(); ++s) {
        const codec::BlockSpan& span = spans.blocks[s];
        while (span.first_granule() >= stripe.blocks[b].last_granule()) ++b;
        const std::uint32_t present = present_.count(span.first_granule(), span.last_granule());
        energies.push_back(present > 0 ? codec::sum_of_squares(mean.block(s)) : 0);
        note_mean(span, energies.back(), present);
        mean.scales.push_back(codec::scale_of_mean(mean.block(s), std::size_t{present} * kGranule,
                                                   averaged[b].gaussian, averaged[b].even));
    }
    encode(spans, mean, energies, std::vector<bool>(spans.blocks.size()), runs);
    return mean.non_finite();
}

void PartReduction::hand_back(bool needed) {
    CodedMean& mean = ops_.at(plan_.seq).mean;
    const auto origin = static_cast<std::uint32_t>(plan_.layout.begin(shard_) / kGranule);
    for (std::uint32_t g = 0, end, all = plan_.layout.granules(shard_); g < all; g = end) {
        end = present_.test(g) ? g + head_at(g).granules : present_.run_end(g, all);
        if (!present_.test(g)) continue;
        mean.packets.push_back({origin + g, head_at(g)});
        const auto packet = packet_at(g);
        std::copy(packet.begin(), packet.end(), slot_of(mean, origin + g));
    }
    PlanesReduction::hand_back(needed);
}

// ---- means ------------------------------------------------------------------------------------------------

PartMeans::PartMeans(ColumnOps& ops, const OpContext& context, const Plan& plan, Block memory)
    : ops_(ops), context_(context), plan_(plan), mean_(&early_) {
    early_.slots = std::move(memory);
}

bool PartMeans::place(const wire::Header& header, std::uint32_t first, std::uint32_t last,
                      std::span<const std::byte> payload) {
    if (plan_.layout.bucket_len % kGranule != 0)
        return true;  // no row has such a shard, and there may be no room for it
    const codec::PlanesHead head = codec::head_of(header);
    const int planes = std::max(1, codec::cut_of(head, payload).bits);  // those that came whole
    const std::uint64_t at = plan_.layout.begin(header.shard) / kGranule + first;
    note_packet(header, first, last, planes);
    mean_->packets.back().head = codec::slice(head, payload, 0, last - first, planes, slot_of(*mean_, at));
    return true;
}

void PartMeans::note_packet(const wire::Header& header, std::uint32_t first, std::uint32_t last, int planes) {
    codec::PlanesHead head = codec::head_of(header);
    const double energy = double{head.sigma} * head.sigma * ((last - first) * kGranule);
    energies_.received += energy;
    energies_.received_trimmed += energy * (codec::nominal_noise(planes) - codec::nominal_noise(head.planes));
    head.granules = last - first;
    head.planes = planes;
    mean_->packets.push_back(
        {static_cast<std::uint32_t>(plan_.layout.begin(header.shard) / kGranule) + first, head});
}

// From now on the mean belongs to the grid, which looks at it when the op has ended.
void PartMeans::enter(std::span<float>, const std::vector<GranuleSet>&, bool) {
    early_.slots.leave_pool();
    if (!early_.slots)
        early_.slots = context_.memory.take(codec::Blocks(plan_.layout.bucket_len).padded() / kGranule *
                                            codec::kSlotFloats);
    mean_ = &ops_.at(plan_.seq).mean;
    *mean_ = std::move(early_);
}

void PartMeans::end(const StandIn&, std::vector<GranuleSet>&, const std::vector<GranuleSet>& held) {
    for (Rank shard = 0; shard < plan_.layout.ranks; ++shard) {
        if (shard == plan_.own_shard() || plan_.layout.length(shard) == 0) continue;
        const std::uint32_t all = plan_.layout.granules(shard), came = held[shard].count(0, all);
        energies_.received_coords += static_cast<double>(came) * kGranule;
        energies_.unseen_coords += static_cast<double>(all - came) * kGranule;
    }
}

}  // namespace tailcut
