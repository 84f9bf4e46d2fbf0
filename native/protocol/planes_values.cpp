#include "protocol/planes_values.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>

namespace tailcut {
namespace {

// A block of which less came is shrunk instead of blown up: unbiased, its error would exceed three times its norm.
constexpr double kMostUnbiasing = 4;

void rotate_back(const codec::BlockSum& sum, std::span<float> z, std::span<float> out, std::uint64_t key) {
    if (sum.weight() > 0)
        sum.rotate_back(z, out, key, std::min(sum.unbiasing(z.size()), kMostUnbiasing));
    else
        std::fill(out.begin(), out.end(), 0.0f);
}

std::span<float> scratch(std::vector<float>& memory, std::size_t floats) {
    if (memory.size() < floats) memory.resize(floats);
    return std::span(memory).first(floats);
}

void add_own(std::span<const float> z, const codec::Scale& scale, std::span<float> sums) {
    if (scale.non_finite)
        std::fill(sums.begin(), sums.end(), std::numeric_limits<float>::quiet_NaN());
    else if (scale.exponent == 0)
        for (std::size_t k = 0; k < z.size(); ++k) sums[k] += z[k];
    else
        for (std::size_t k = 0; k < z.size(); ++k) sums[k] += std::ldexp(z[k], -scale.exponent);
}

std::uint32_t first_of(const codec::BlockSpan& block) { return block.begin / kGranule; }
std::uint32_t last_of(const codec::BlockSpan& block) {
    return (block.begin + block.length - 1) / kGranule + 1;
}

void describe(const codec::PlanesHead& head, std::uint32_t first, std::uint32_t shard_len,
              wire::Header& header) {
    header.codec = wire::Codec::kPlanes;
    header.planes = static_cast<std::uint8_t>(head.planes);
    header.scale = head.sigma;
    header.gain_one = head.gain_one;
    header.gain_full = head.gain_full;
    header.first = first * kGranule;
    header.count = static_cast<std::uint16_t>(std::min(head.granules * kGranule, shard_len - header.first));
}

}  // namespace

// ---- contributions ----------------------------------------------------------------------------------------

// Packets on their way out keep it alive, so that the next one can be encoded before they are sent.
struct PlanesContributions::EncodedStripe {
    std::uint32_t index = 0, first_step = 0;
    codec::Stripe stripe;
    std::vector<codec::PlanesHead> heads;  // by block
    Block slots;
};

PlanesContributions::PlanesContributions(OpContext& context, Seq seq, const Layout& layout, int planes,
                                         std::span<const float> bucket)
    : context_(context),
      seq_(seq),
      layout_(layout),
      planes_(planes),
      bucket_(bucket),
      encoded_(layout.ranks) {
    for (Rank shard = 0; shard < layout.ranks; ++shard) {
        const codec::PacketLimits& limits = context.limits[context.shape.owner(shard, seq)];
        orders_.emplace_back(layout.length(shard), context.granules(limits, planes));
        steps_.push_back(std::max(1u, orders_.back().packets()));
    }
}

bool PlanesContributions::next(Rank shard, const GranuleSet& answered, std::uint32_t& sent, Outgoing& out) {
    const std::uint32_t index = orders_[shard].stripe_of_packet(sent);
    auto& encoded = encoded_[shard];
    if (!encoded || encoded->index != index) encoded = encode(shard, index, answered);
    const codec::PacketRun& run = encoded->stripe.packets[sent - encoded->first_step];
    const codec::BlockSpan& block = encoded->stripe.blocks[run.block];
    const auto keeper = encoded;
    if (++sent == steps_[shard]) encoded.reset();
    if (answered.any(first_of(block), last_of(block))) return false;

    codec::PlanesHead head = keeper->heads[run.block];
    head.granules = run.last - run.first;
    describe(head, run.first, layout_.length(shard), out.header);
    out.header.flags = std::isnan(head.sigma) ? wire::kNonFinite : 0;
    const std::size_t at = std::size_t{run.first - keeper->stripe.first_granule()} * codec::kSlotBytes;
    out.payload = {reinterpret_cast<const std::byte*>(keeper->slots.data()) + at, head.payload_bytes()};
    out.keeper = keeper;
    return true;
}

std::shared_ptr<const PlanesContributions::EncodedStripe> PlanesContributions::encode(
    Rank shard, std::uint32_t index, const GranuleSet& answered) {
    auto encoded = std::make_shared<EncodedStripe>();
    encoded->index = index;
    encoded->first_step = orders_[shard].first_packet(index);
    encoded->stripe = orders_[shard].stripe(index);
    const std::uint32_t first = encoded->stripe.first_granule(), last = encoded->stripe.last_granule();
    if (answered.all(first, last)) return encoded;
    const codec::BlockKeys keys(context_.shape.seed, seq_, shard);
    const auto rotated = codec::rotate_stripe(bucket_.subspan(layout_.begin(shard), layout_.length(shard)),
                                              encoded->stripe.blocks, keys,
                                              scratch(context_.stripe, std::size_t{last - first} * kGranule));
    encoded->slots = context_.memory.take((last - first) * codec::kSlotFloats);
    encoded->heads = codec::encode_stripe(rotated, encoded->stripe.packets, keys, planes_,
                                          reinterpret_cast<std::byte*>(encoded->slots.data()));
    return encoded;
}

void PlanesContributions::retract(const Outgoing& out) {
    encoded_[out.header.shard] = std::static_pointer_cast<const EncodedStripe>(out.keeper);
}

std::uint32_t PlanesContributions::first_unseen(Rank shard, std::uint32_t sent) const {
    const codec::SendOrder& order = orders_[shard];
    return sent < steps_[shard] ? order.first_granule(order.stripe_of_packet(sent)) : layout_.granules(shard);
}

// ---- the owned shard --------------------------------------------------------------------------------------

PlanesReduction::PlanesReduction(OpContext& context, Seq seq, const Layout& layout, int planes, Block memory)
    : context_(context),
      layout_(layout),
      shard_(context.shape.shard_of(context.shape.self, seq)),
      keys_(context.shape.seed, seq, shard_),
      blocks_(layout.length(shard_)),
      planes_(planes),
      memory_(std::move(memory)),
      mean_(memory_ ? bytes(memory_) + (layout.ranks - 1u) * mean_floats(layout) * sizeof(float) : nullptr),
      newest_(std::size_t{blocks_.count()} * layout.ranks, kNone),
      heads_(blocks_.count()),
      present_(layout.granules(shard_)),
      lengths_(layout.granules(shard_)) {
    const codec::SendOrder order = send_order();
    for (std::uint32_t k = 0; k < order.stripes(); ++k)
        unsettled_.push_back(order.first_granule(k + 1) - order.first_granule(k));
}

codec::SendOrder PlanesReduction::send_order() const {
    return {layout_.length(shard_), context_.granules(context_.gather_limits, planes_)};
}

std::byte* PlanesReduction::slot(Rank rank, std::uint32_t granule) const {
    const std::size_t place = rank < context_.shape.self ? rank : rank - 1u;
    return bytes(memory_) + place * mean_floats(layout_) * sizeof(float) + granule * codec::kSlotBytes;
}

// What is kept never takes more than the slots of the granules that came, so that pieces do not overlap.
void PlanesReduction::offer(const wire::Header& header, std::uint32_t first, std::uint32_t,
                            std::span<const std::byte> payload) {
    std::copy(payload.begin(), payload.end(), slot(header.source, first));
    std::uint32_t& newest = newest_[blocks_.of(header.first).index * layout_.ranks + header.source];
    pieces_.push_back({first, static_cast<std::uint32_t>(payload.size()), codec::head_of(header),
                       std::exchange(newest, static_cast<std::uint32_t>(pieces_.size()))});
}

bool PlanesReduction::settle(std::uint32_t first, std::uint32_t last, const std::vector<GranuleSet>& arrived,
                             std::vector<Run>& runs) {
    if (unsettled_.empty()) {  // a shard without coordinates
        runs.push_back({first, last, true});
        return false;
    }
    bool non_finite = false;
    const codec::SendOrder order = send_order();
    for (std::uint32_t g = first; g < last;) {
        const std::uint32_t index = order.stripe_of_granule(g);
        const std::uint32_t end = std::min(last, order.first_granule(index + 1));
        unsettled_[index] -= end - g;
        if (unsettled_[index] == 0) non_finite |= reduce(order.stripe(index), arrived, runs);
        g = end;
    }
    return non_finite;
}

bool PlanesReduction::reduce(const codec::Stripe& stripe, const std::vector<GranuleSet>& arrived,
                             std::vector<Run>& runs) {
    const std::uint32_t first = stripe.first_granule(), last = stripe.last_granule();
    const std::size_t coords = std::size_t{last - first} * kGranule;
    codec::RotatedStripe mean{stripe.blocks, scratch(context_.stripe, coords), {}}, own;
    if (bucket_shard_ && arrived[context_.shape.self].any(first, last))
        own = codec::rotate_stripe({bucket_shard_, layout_.length(shard_)}, stripe.blocks, keys_,
                                   scratch(context_.own, coords));
    for (std::size_t b = 0; b < stripe.blocks.size(); ++b)
        mean.scales.push_back(reduce_block(stripe.blocks[b], mean.block(b), own, b, arrived));

    const std::vector<codec::PacketRun> packets = cut_at_gaps(stripe, runs);
    if (!packets.empty()) {
        const auto heads = codec::encode_stripe(mean, packets, keys_, planes_, mean_slot(first));
        std::copy(heads.begin(), heads.end(), heads_.begin() + stripe.blocks.front().index);
    }
    for (const codec::BlockSpan& block : stripe.blocks)
        if (bucket_shard_) apply(block, bucket_shard_);
    return mean.non_finite();
}

// Rules 4 and 5: Σ c_b(q)·σ / Σ w_b in rank order; the own contribution as it is.
codec::Scale PlanesReduction::reduce_block(const codec::BlockSpan& block, std::span<float> sums,
                                           const codec::RotatedStripe& own, std::size_t index,
                                           const std::vector<GranuleSet>& arrived) {
    std::array<float, codec::kBlock / kGranule> weights{};
    const std::uint32_t granules = block.length / kGranule, begin = first_of(block);
    std::fill(sums.begin(), sums.end(), 0.0f);
    bool gaussian = true;  // unless somebody's values are few: coarse, or those of a block far from Gaussian
    for (Rank rank = 0; rank < layout_.ranks; ++rank) {
        if (rank == context_.shape.self) {
            if (own.scales.empty()) continue;
            add_own(own.block(index), own.scales[index], sums);
            gaussian = gaussian && (own.scales[index].gaussian || own.scales[index].unit == 0);
            for (std::uint32_t g = 0; g < granules; ++g) weights[g] += 1;
            continue;
        }
        for (std::uint32_t k = newest_[block.index * layout_.ranks + rank]; k != kNone; k = pieces_[k].next) {
            const Piece& piece = pieces_[k];
            if (!arrived[rank].test(piece.first)) continue;  // given up since
            const std::uint32_t at = piece.first - begin;
            const codec::Cut cut =
                codec::accumulate(piece.head, {slot(rank, piece.first), piece.payload_bytes},
                                  sums.subspan(at * kGranule), std::span(weights).subspan(at));
            gaussian = gaussian && cut.bits >= codec::kMeasuredBits && !codec::far_from_gaussian(piece.head);
        }
    }
    std::uint32_t present = 0;
    const bool even = std::all_of(weights.begin(), weights.begin() + granules,
                                  [&](float weight) { return weight == weights[0]; });
    for (std::uint32_t g = 0; g < granules; ++g) {
        if (weights[g] == 0) continue;
        ++present;
        present_.set(begin + g, begin + g + 1);
        for (float& value : sums.subspan(g * kGranule, kGranule)) value /= weights[g];
    }
    return codec::scale_of_mean(sums, std::size_t{present} * kGranule, gaussian, even);
}

// The packets of a stripe without the granules that nobody delivered, and all of it as runs, in the order of sending.
std::vector<codec::PacketRun> PlanesReduction::cut_at_gaps(const codec::Stripe& stripe,
                                                           std::vector<Run>& runs) {
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
            if (!present_.test(at)) continue;
            packets.push_back({at, end, whole.block});
            lengths_[at] = static_cast<std::uint16_t>(end - at);
        }
    return packets;
}

codec::PlanesHead PlanesReduction::head_at(std::uint32_t granule) const {
    codec::PlanesHead head = heads_[blocks_.of(granule * kGranule).index];
    head.granules = lengths_[granule];
    return head;
}

// Rule 6: the owner decodes what it sends, as everybody does.
void PlanesReduction::apply(const codec::BlockSpan& block, float* bucket_shard) const {
    const auto z = scratch(context_.own, block.length);
    const std::uint32_t begin = first_of(block), last = last_of(block);
    codec::BlockSum sum;
    for (std::uint32_t g = begin, end; g < last; g = end) {
        const auto place = z.subspan((g - begin) * kGranule);
        if (present_.test(g)) {
            const codec::PlanesHead head = head_at(g);
            end = g + head.granules;
            sum.add(head, {mean_slot(g), head.payload_bytes()}, place);
        } else {
            end = present_.run_end(g, last);
            std::fill_n(place.begin(), (end - g) * kGranule, 0.0f);
        }
    }
    const std::uint32_t length = std::min(block.length, layout_.length(shard_) - block.begin);
    rotate_back(sum, z, {bucket_shard + block.begin, length}, keys_.of(block));
}

std::uint32_t PlanesReduction::packet(Rank, const Run& run, Outgoing& out) const {
    const codec::PlanesHead head = head_at(run.first);
    describe(head, run.first, layout_.length(shard_), out.header);
    out.payload = {mean_slot(run.first), head.payload_bytes()};
    return head.granules;
}

void PlanesReduction::take_over(std::span<const Run>, float* bucket_shard) const {
    const codec::SendOrder order = send_order();
    for (std::uint32_t k = 0; k < order.stripes(); ++k)
        if (unsettled_[k] == 0)
            for (const codec::BlockSpan& block : order.stripe(k).blocks) apply(block, bucket_shard);
}

void PlanesReduction::compact(Block smaller) {
    std::copy_n(mean_, mean_floats() * sizeof(float), bytes(smaller));
    memory_ = std::move(smaller);
    mean_ = bytes(memory_);
    pieces_ = {};
}

// ---- means ------------------------------------------------------------------------------------------------

PlanesMeans::PlanesMeans(const OpContext& context, Seq seq, const Layout& layout, Block memory)
    : shape_(context.shape), seq_(seq), layout_(layout), memory_(std::move(memory)), base_(memory_.data()) {
    for (Rank shard = 0; shard < layout.ranks; ++shard)
        blocks_.emplace_back(codec::Blocks(layout.length(shard)).count());
}

// Where a block is until it has been rotated back: in place, unless it is longer than what is left of the bucket.
std::span<float> PlanesMeans::rotated(Rank shard, const codec::BlockSpan& block) {
    const auto there = result(shard, block);
    return there.size() == block.length ? there : scratch(ragged_, block.length);
}

std::span<float> PlanesMeans::result(Rank shard, const codec::BlockSpan& block) const {
    return {base_ + layout_.begin(shard) + block.begin,
            std::min(block.length, layout_.length(shard) - block.begin)};
}

template <typename Visit>
void PlanesMeans::each_block(Rank shard, std::uint32_t first, std::uint32_t last, Visit visit) {
    const codec::Blocks blocks(layout_.length(shard));
    const auto end = std::min<std::uint64_t>(blocks.padded(), std::uint64_t{last} * kGranule);
    for (std::uint64_t at = std::uint64_t{first} * kGranule; at < end;) {
        const codec::BlockSpan block = blocks.of(static_cast<std::uint32_t>(at));
        visit(block, blocks_[shard][block.index]);
        at = std::uint64_t{block.begin} + block.length;
    }
}

void PlanesMeans::place(const wire::Header& header, std::uint32_t, std::uint32_t,
                        std::span<const std::byte> payload) {
    const codec::BlockSpan block = codec::Blocks(layout_.length(header.shard)).of(header.first);
    blocks_[header.shard][block.index].sum.add(
        codec::head_of(header), payload, rotated(header.shard, block).subspan(header.first - block.begin));
}

void PlanesMeans::settle(Rank shard, std::uint32_t first, std::uint32_t last, const GranuleSet& answered,
                         const GranuleSet& held) {
    each_block(shard, first, last, [&](const codec::BlockSpan& block, Incoming& incoming) {
        if (!incoming.done && answered.all(first_of(block), last_of(block))) complete(shard, block, held);
    });
}

void PlanesMeans::complete(Rank shard, const codec::BlockSpan& block, const GranuleSet& held) {
    Incoming& incoming = blocks_[shard][block.index];
    const auto z = rotated(shard, block);
    const std::uint32_t begin = first_of(block), last = last_of(block);
    for (std::uint32_t g = begin, end; g < last; g = end) {
        end = held.run_end(g, last);
        if (!held.test(g)) std::fill_n(z.begin() + (g - begin) * kGranule, (end - g) * kGranule, 0.0f);
    }
    const codec::BlockKeys keys(shape_.seed, seq_, shard);
    rotate_back(incoming.sum, z, result(shard, block), keys.of(block));
    incoming.done = true;
}

void PlanesMeans::enter(std::span<float> bucket, const std::vector<GranuleSet>& held) {
    const float* before = std::exchange(base_, bucket.data());
    for (Rank shard = 0; memory_ && shard < layout_.ranks; ++shard)
        each_block(shard, 0, layout_.granules(shard), [&](const codec::BlockSpan& block, Incoming& incoming) {
            const auto to = result(shard, block);
            const float* from = before + (to.data() - base_);
            if (incoming.done) std::copy_n(from, to.size(), to.begin());
            if (incoming.done || to.size() < block.length) return;  // a ragged block is not in the bucket yet
            for (std::uint32_t g = first_of(block), end; g < last_of(block); g = end) {
                end = held[shard].run_end(g, last_of(block));
                const std::uint32_t at = g * kGranule - block.begin;
                if (held[shard].test(g)) std::copy_n(from + at, (end - g) * kGranule, to.begin() + at);
            }
        });
    memory_ = {};
}

void PlanesMeans::finish(Rank own_shard, const std::vector<GranuleSet>& held) {
    for (Rank shard = 0; shard < layout_.ranks; ++shard)
        if (shard != own_shard)
            each_block(shard, 0, layout_.granules(shard),
                       [&](const codec::BlockSpan& block, Incoming& incoming) {
                           if (!incoming.done) complete(shard, block, held[shard]);
                       });
}

}  // namespace tailcut
