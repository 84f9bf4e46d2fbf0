#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>

#include "codec/rotate.hpp"
#include "protocol/carry/carry.hpp"
#include "protocol/values/planes_values.hpp"

namespace tailcut {
namespace {

void add_own(std::span<const float> z, const codec::Scale& scale, std::span<float> sums) {
    if (scale.non_finite)
        std::fill(sums.begin(), sums.end(), std::numeric_limits<float>::quiet_NaN());
    else if (scale.exponent == 0)
        for (std::size_t k = 0; k < z.size(); ++k) sums[k] += z[k];
    else
        for (std::size_t k = 0; k < z.size(); ++k) sums[k] += std::ldexp(z[k], -scale.exponent);
}

}  // namespace

PlanesReduction::PlanesReduction(const OpContext& context, const Plan& plan, const Coding& gather,
                                 Block memory)
    : context_(context),
      plan_(plan),
      shard_(plan.own_shard()),
      keys_(context.shape.seed, plan.seq, shard_),
      blocks_(plan.layout.length(shard_)),
      coding_(gather),
      present_(plan.layout.granules(shard_)),
      memory_(std::move(memory)),
      mean_(memory_ ? bytes(memory_) + (plan.layout.ranks - 1u) * mean_floats(plan.layout) * sizeof(float)
                    : nullptr),
      newest_(std::size_t{blocks_.count()} * plan.layout.ranks, kNone),
      packets_(plan.layout.granules(shard_)) {
    const codec::SendOrder order = send_order(coding_);
    for (std::uint32_t k = 0; k < order.stripes(); ++k)
        open_.push_back(order.first_granule(k + 1) - order.first_granule(k));
}

codec::SendOrder PlanesReduction::send_order(const Coding& coding) const {
    return {plan_.layout.length(shard_), context_.granules(context_.gather_limits, coding)};
}

std::byte* PlanesReduction::slot(Rank rank, std::uint32_t granule) const {
    const std::size_t place = rank < context_.shape.self ? rank : rank - 1u;
    return bytes(memory_) + place * mean_floats(plan_.layout) * sizeof(float) + granule * codec::kSlotBytes;
}

void PlanesReduction::offer(const wire::Header& header, std::uint32_t first, std::uint32_t,
                            std::span<const std::byte> payload) {
    keep(header.source, first, codec::head_of(header), payload, 1);
}

// What is kept never takes more than the slots of the granules that came, so that pieces do not overlap.
void PlanesReduction::keep(Rank from, std::uint32_t first, const codec::PlanesHead& head,
                           std::span<const std::byte> payload, float count) {
    std::copy(payload.begin(), payload.end(), slot(from, first));
    std::uint32_t& newest = newest_[blocks_.of(first * kGranule).index * plan_.layout.ranks + from];
    pieces_.push_back({first, static_cast<std::uint32_t>(payload.size()), head, count,
                       std::exchange(newest, static_cast<std::uint32_t>(pieces_.size()))});
}

bool PlanesReduction::reduce(std::uint32_t first, std::uint32_t last, const std::vector<GranuleSet>& arrived,
                             std::vector<Run>& runs) {
    if (open_.empty()) {  // a shard without coordinates
        runs.push_back({first, last, true});
        return false;
    }
    bool non_finite = false;
    const codec::SendOrder order = send_order(coding_);
    for (std::uint32_t g = first; g < last;) {
        const std::uint32_t index = order.stripe_of_granule(g);
        const std::uint32_t end = std::min(last, order.first_granule(index + 1));
        open_[index] -= end - g;
        if (open_[index] == 0) non_finite |= reduce_stripe(order.stripe(index), arrived, runs);
        g = end;
    }
    return non_finite;
}

bool PlanesReduction::reduce_stripe(const codec::Stripe& stripe, const std::vector<GranuleSet>& arrived,
                                    std::vector<Run>& runs) {
    const std::uint32_t first = stripe.first_granule(), last = stripe.last_granule();
    const std::size_t coords = std::size_t{last - first} * kGranule;
    const Own own = own_stripe(stripe, arrived);
    codec::RotatedStripe mean{stripe.blocks, grown(context_.scratch.stripe, coords), {}};
    std::vector<double> energies;
    std::vector<bool> residues;
    for (std::size_t b = 0; b < stripe.blocks.size(); ++b) {
        const auto z = mean.block(b);
        Averaged averaged = average_block(stripe.blocks[b], z, own, b, arrived);
        energies.push_back(averaged.present > 0 ? codec::sum_of_squares(z) : 0);
        note_mean(stripe.blocks[b], energies.back(), averaged.present);
        if (carry_block(stripe.blocks[b], z, averaged, arrived, !own.values.scales.empty()))
            energies.back() = codec::sum_of_squares(z);
        residues.push_back(averaged.has_residue);
        mean.scales.push_back(codec::scale_of_mean(z, std::size_t{averaged.present} * kGranule,
                                                   averaged.gaussian, averaged.even));
    }
    encode(stripe, mean, energies, residues, runs);
    for (std::size_t b = 0; bucket_shard_ && b < stripe.blocks.size(); ++b) {
        apply(stripe.blocks[b], bucket_shard_);
        if (residues[b]) note_residue(stripe.blocks[b], mean.block(b), mean.scales[b]);
    }
    return mean.non_finite();
}

// Times the members, as what is late: so it is the same where others come to own the coordinates.
void PlanesReduction::note_residue(const codec::BlockSpan& block, std::span<float> mean,
                                   const codec::Scale& scale) {
    if (scale.non_finite) return;
    codec::unrotate(mean, mean, keys_.of(block), std::ldexp(1.0f, -scale.exponent));
    const std::size_t length = std::min(block.length, plan_.layout.length(shard_) - block.begin);
    const float members = coding_.planes <= kCarriedPlanes ? static_cast<float>(plan_.members()) : 0.0f;
    for (std::size_t k = 0; k < length; ++k)
        residue[block.begin + k] = members * (mean[k] - bucket_shard_[block.begin + k]);
}

bool PlanesReduction::carry_block(const codec::BlockSpan& block, std::span<float> mean, Averaged& averaged,
                                  const std::vector<GranuleSet>& arrived, bool contributes) {
    if (!abstains_ || !memory_ || !context_.carries(plan_)) return false;
    const std::uint32_t first = block.first_granule(), last = block.last_granule();
    context_.carry.await(context_, plan_, loss_scale_tag, first, last, arrived, *abstains_,
                         averaged.present > 0 ? std::span<const float>(mean) : std::span<const float>());
    const bool late = context_.carry.any(plan_, first, last);
    // It goes with the own contribution. A block that is EMPTY in part would keep a part of it, so that waits too.
    averaged.has_residue = contributes && !residue.empty() && (late || averaged.present == last - first);
    if (!late && !averaged.has_residue) return false;
    const auto sum = grown(context_.scratch.carried, block.length);
    std::fill(sum.begin(), sum.end(), 0.0f);
    if (late) context_.carry.add_to(plan_, loss_scale_tag, first, last, sum);
    const std::size_t length = std::min(block.length, plan_.layout.length(shard_) - block.begin);
    for (std::size_t k = 0; averaged.has_residue && k < length; ++k) sum[k] += residue[block.begin + k];
    codec::rotate(sum, sum, keys_.of(block));
    const auto members = static_cast<float>(plan_.members());
    for (std::size_t k = 0; k < sum.size(); ++k) mean[k] += sum[k] / members;
    if (!late) return true;
    present_.set(first, last);
    averaged = {last - first, false, false, averaged.has_residue};  // its gains are measured
    return true;
}

void PlanesReduction::hand_on(const std::vector<GranuleSet>& arrived, const GranuleSet& final) {
    LateShard* late = context_.carry.late_shard(plan_);
    if (!late) return;
    for (std::size_t place = 0; place < newest_.size(); ++place) {
        const Rank rank = static_cast<Rank>(place % plan_.layout.ranks);
        for (std::uint32_t k = newest_[place]; k != kNone; k = pieces_[k].next) {
            const Piece& piece = pieces_[k];
            if (final.test(piece.first) || !arrived[rank].test(piece.first)) continue;
            wire::Header header;
            codec::put_run(piece.head, piece.first, plan_.layout.length(shard_), header);
            header.source = rank;
            if (std::isnan(piece.head.sigma)) header.flags |= wire::kNonFinite;
            late->put(header, {slot(rank, piece.first), piece.payload_bytes});
        }
    }
    if (bucket_shard_ && !late->put_own({bucket_shard_, plan_.layout.length(shard_)}))
        context_.carry.note_eviction();
}

PlanesReduction::Own PlanesReduction::own_stripe(const codec::Stripe& stripe,
                                                 const std::vector<GranuleSet>& arrived) const {
    const std::uint32_t first = stripe.first_granule(), last = stripe.last_granule();
    if (!bucket_shard_ || !arrived[context_.shape.self].any(first, last)) return {};
    return {codec::rotate_stripe({bucket_shard_, plan_.layout.length(shard_)}, stripe.blocks, keys_,
                                 grown(context_.scratch.own, std::size_t{last - first} * kGranule)),
            {}};
}

void PlanesReduction::encode(const codec::Stripe& stripe, const codec::RotatedStripe& mean,
                             std::span<const double> energies, const std::vector<bool>& residues,
                             std::vector<Run>& runs) {
    const std::vector<codec::PacketRun> packets = cut_at_gaps(stripe, runs);
    if (packets.empty()) return;
    const auto coded =
        codec::encode_stripe(mean, packets, keys_, coding_.planes, mean_slot(stripe.first_granule()));
    for (std::size_t b = 0; b < coded.size(); ++b) {
        energies_.mean_quantized += coded[b].noise * energies[b];
        if (residues[b]) energies_.mean_carried += coded[b].noise * energies[b];
    }
    for (const codec::PacketRun& packet : packets) {
        codec::PlanesHead head = coded[packet.block].head;
        head.granules = packet.last - packet.first;
        add_packet(packet.first, head);
    }
}

std::byte* PlanesReduction::add_packet(std::uint32_t first, const codec::PlanesHead& head) {
    packets_[first] = static_cast<std::uint32_t>(heads_.size());
    heads_.push_back(head);
    return mean_slot(first);
}

// Rules 4 and 5: Σ c_b(q)·σ / Σ w_b in rank order; the own contribution as it is.
PlanesReduction::Averaged PlanesReduction::average_block(const codec::BlockSpan& block, std::span<float> mean,
                                                         const Own& own, std::size_t index,
                                                         const std::vector<GranuleSet>& arrived) {
    std::array<float, codec::kBlock / kGranule> weights{};
    const std::uint32_t granules = block.length / kGranule, begin = block.first_granule();
    std::fill(mean.begin(), mean.end(), 0.0f);
    Averaged averaged{0, accumulate_block(block, mean, weights, own, index, arrived), true};
    averaged.even = std::all_of(weights.begin(), weights.begin() + granules,
                                [&](float weight) { return weight == weights[0]; });
    for (std::uint32_t g = 0; g < granules; ++g) {
        if (weights[g] == 0) continue;
        ++averaged.present;
        present_.set(begin + g, begin + g + 1);
        for (float& value : mean.subspan(g * kGranule, kGranule)) value /= weights[g];
    }
    return averaged;
}

bool PlanesReduction::accumulate_block(const codec::BlockSpan& block, std::span<float> sums,
                                       std::span<float> weights, const Own& own, std::size_t index,
                                       const std::vector<GranuleSet>& arrived) {
    const std::uint32_t granules = block.length / kGranule, begin = block.first_granule();
    bool gaussian = true;  // unless somebody's values are few: coarse, or those of a block far from Gaussian
    std::vector<Account> accounts(granules);
    double squares = 0, came = 0, planes = 0, coded = 0;  // Σσ² and granules, then of coded ones
    for (Rank rank = 0; rank < plan_.layout.ranks; ++rank) {
        if (rank == context_.shape.self) {
            if (own.values.scales.empty()) continue;
            const codec::Scale& scale = own.values.scales[index];
            add_own(own.values.block(index), scale, sums);
            gaussian = gaussian && !scale.far_from_gaussian();
            const std::uint32_t before = begin - own.values.blocks.front().first_granule();
            for (std::uint32_t g = 0; g < granules; ++g) {
                const float count = own.counts.empty() ? 1 : own.counts[before + g];
                if (count == 0) continue;
                weights[g] += count, accounts[g] += {1, count, 0, count, 0};
                squares += double{scale.sigma} * scale.sigma, came += 1;
            }
            continue;
        }
        for (std::uint32_t k = newest_[block.index * plan_.layout.ranks + rank]; k != kNone;
             k = pieces_[k].next) {
            const Piece& piece = pieces_[k];
            if (!arrived[rank].test(piece.first)) continue;  // given up since
            const std::uint32_t at = piece.first - begin;
            const codec::Cut cut =
                codec::accumulate(piece.head, {slot(rank, piece.first), piece.payload_bytes},
                                  sums.subspan(at * kGranule), weights.subspan(at), piece.count);
            gaussian = gaussian && cut.bits >= codec::kMeasuredBits && !codec::far_from_gaussian(piece.head);
            const double count = piece.count, stated = count * codec::stated_weight(piece.head);
            const double square = double{piece.head.sigma} * piece.head.sigma;
            // C = w·z + n with n orthogonal to z; of Gaussian blocks w = 1 - D and |C|² = w·|z|².
            const auto noise = [&](int bits) {
                const double distortion = codec::kDistortion[static_cast<std::size_t>(bits)];
                return count * count * distortion * (1 - distortion) * square;
            };
            const double whole = noise(piece.head.planes), less = noise(cut.bits),
                         more = noise(std::min(cut.bits + 1, codec::kMaxPlanes));
            for (std::uint32_t g = 0; g < piece.head.granules; ++g) {
                const double weight = count * cut.weight_of(g);
                if (weight == 0) continue;
                accounts[at + g] += {1, weight, g < cut.longer ? more : less, stated, whole};
                squares += square, came += 1, coded += 1, planes += piece.head.planes;
            }
        }
    }
    if (came == 0) return gaussian;
    const double contribution = kGranule * squares / came;
    energies_.contributed += contribution * granules;
    energies_.planes += contribution * granules * (coded > 0 ? planes / coded : 0);
    for (const Account& account : accounts) {
        if (account.weight == 0) {  // EMPTY: what is missing is in void_mean
            energies_.sampled += contribution / plan_.layout.ranks;
            continue;
        }
        const double stated =
            kGranule * account.stated_noise / (account.stated_weight * account.stated_weight);
        const double whole = account.weight * account.weight;
        energies_.sampled += contribution / account.number;
        energies_.quantized += stated;
        energies_.trimmed += kGranule * account.noise / whole - stated;
    }
    return gaussian;
}

void PlanesReduction::note_mean(const codec::BlockSpan& block, double energy, std::uint32_t present) {
    if (present == 0) {
        energies_.void_coords += block.length;
        return;
    }
    energies_.mean += energy;
    energies_.coords += block.length;
    energies_.void_mean += energy * (block.length / kGranule - present) / present;
}

// The packets of a stripe without the granules that nobody delivered, and all of it as runs, in the order of sending.
std::vector<codec::PacketRun> PlanesReduction::cut_at_gaps(const codec::Stripe& stripe,
                                                           std::vector<Run>& runs) const {
    std::vector<codec::PacketRun> packets;
    const std::uint32_t first = stripe.first_granule(), last = stripe.last_granule();
    if (!present_.any(first, last)) {
        runs.push_back({first, last, true});
        return packets;
    }
    for (const codec::PacketRun& whole : stripe.packets)
        for (std::uint32_t at = whole.first, end; at < whole.last; at = end) {
            end = present_.run_end(at, whole.last);
            runs.push_back({at, end, !present_.test(at)});
            if (present_.test(at)) packets.push_back({at, end, whole.block});
        }
    return packets;
}

// Rule 6: the owner decodes what it sends, as everybody does.
void PlanesReduction::apply(const codec::BlockSpan& block, float* bucket_shard) const {
    const auto z = grown(context_.scratch.own, block.length);
    const std::uint32_t begin = block.first_granule(), last = block.last_granule();
    codec::BlockSum sum;
    for (std::uint32_t g = begin, end; g < last; g = end) {
        const auto place = z.subspan((g - begin) * kGranule);
        if (present_.test(g)) {
            const codec::PlanesHead& head = head_at(g);
            end = g + head.granules;
            sum.add(head, packet_at(g), place);
        } else {
            end = present_.run_end(g, last);
            std::fill_n(place.begin(), (end - g) * kGranule, 0.0f);
        }
    }
    const std::uint32_t length = std::min(block.length, plan_.layout.length(shard_) - block.begin);
    const std::span<float> out(bucket_shard + block.begin, length);
    if (context_.carries(plan_))  // what is EMPTY comes later, and nothing makes up for it
        sum.rotate_back(z, out, keys_.of(block), sum.unbiasing());
    else
        sum.rotate_back_bounded(z, out, keys_.of(block));
}

std::uint32_t PlanesReduction::packet(Destination, const Run& run, Outgoing& out) const {
    const codec::PlanesHead& head = head_at(run.first);
    codec::put_run(head, run.first, plan_.layout.length(shard_), out.header);
    out.payload = packet_at(run.first);
    return head.granules;
}

void PlanesReduction::take_over(std::span<const Run>, float* bucket_shard) const {
    const codec::SendOrder order = send_order(coding_);
    for (std::uint32_t k = 0; k < order.stripes(); ++k)
        if (open_[k] == 0)
            for (const codec::BlockSpan& block : order.stripe(k).blocks) apply(block, bucket_shard);
}

// What the packets take: few planes need a part of their slots.
std::size_t PlanesReduction::mean_floats() const {
    std::size_t all = 0;
    for (const codec::PlanesHead& head : heads_) all += head.payload_bytes();
    return (all + sizeof(float) - 1) / sizeof(float);
}

void PlanesReduction::compact(Block smaller) {
    std::vector<std::size_t> packed(heads_.size());
    std::size_t end = 0;
    for (std::uint32_t g = 0; g < packets_.size(); g = present_.test(g) ? g + head_at(g).granules : g + 1) {
        if (!present_.test(g)) continue;
        const auto packet = packet_at(g);
        packed[packets_[g]] = end;
        std::copy(packet.begin(), packet.end(), bytes(smaller) + end);
        end += packet.size();
    }
    packed_ = std::move(packed);
    memory_ = std::move(smaller);
    mean_ = bytes(memory_);
    pieces_ = {};
}

}  // namespace tailcut
