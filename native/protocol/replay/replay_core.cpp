#include "protocol/replay/replay_core.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

namespace tailcut {
namespace {

constexpr Time kNow = 1;  // nothing here waits
constexpr std::size_t kUnbounded = std::size_t{1} << 46;
constexpr std::uint32_t kMostEmptyGranules = 0xFFFF / kGranule;  // Header::count is 16 bits

void append(ReplayCore::Bytes& to, const Outgoing& out, Rank self) {
    wire::Header header = out.header;
    header.source = self;
    const wire::HeaderBytes head = wire::pack(header);
    const auto size = static_cast<std::uint32_t>(head.size() + out.payload.size());
    const auto* length = reinterpret_cast<const std::byte*>(&size);
    to.insert(to.end(), length, length + sizeof(size));
    to.insert(to.end(), head.begin(), head.end());
    to.insert(to.end(), out.payload.begin(), out.payload.end());
}

// Ranks of a replay trust each other, but one may run another script than the one that was recorded.
void check(const wire::Header& header, const Plan& plan) {
    const std::uint64_t last = std::uint64_t{header.first} + header.count;
    if (bucket_of(header) != plan.bucket || header.shard >= plan.layout.ranks ||
        last > std::uint64_t{plan.layout.granules(header.shard)} * kGranule)
        throw std::invalid_argument("op " + std::to_string(header.seq) + ": rank " +
                                    std::to_string(header.source) +
                                    " has cut its bucket in another way; it does other steps than those "
                                    "that were recorded");
}

template <typename Visit>
void each_packet(std::span<const std::byte> blob, Visit visit) {
    while (!blob.empty()) {
        std::uint32_t size = 0;
        std::memcpy(&size, blob.data(), sizeof(size));
        const auto datagram = blob.subspan(sizeof(size), size);
        visit(wire::parse(datagram).header, datagram.subspan(wire::kHeaderBytes));
        blob = blob.subspan(sizeof(size) + size);
    }
}

// The packets, or the parts of packets, that lie in the runs. Planes are taken as whole packets, of which only the first
// bytes may have come; raw values can be cut anywhere.
template <typename Visit>
void each_part(std::span<const std::byte> blob, const ReplayCore::Runs& runs, const ReplayCore::Cuts& cuts,
               Visit visit) {
    each_packet(blob, [&](const wire::Header& header, std::span<const std::byte> payload) {
        const std::uint32_t first = header.first / kGranule;
        const std::uint32_t last = header.count == 0 ? std::numeric_limits<std::uint32_t>::max()
                                                     : first + (header.count + kGranule - 1) / kGranule;
        for (const auto& [from, until] : runs) {
            if (until <= first || last <= from) continue;
            if (header.codec == wire::Codec::kPlanes || header.empty()) {
                const auto cut = cuts.find(first);
                const std::size_t came = cut == cuts.end() ? payload.size() : cut->second;
                visit(header, payload.first(std::min(came, payload.size())));
                return;
            }
            wire::Header part = header;
            const std::uint32_t begin = std::max(first, from), end = std::min(last, until);
            part.first = begin * kGranule;
            const std::uint32_t coords = std::min(end * kGranule, header.first + header.count) - part.first;
            part.count = static_cast<std::uint16_t>(coords);
            visit(part, payload.subspan((part.first - header.first) * sizeof(float), coords * sizeof(float)));
        }
    });
}

}  // namespace

ReplayCore::ReplayCore(const Shape& shape, wire::Codec codec, std::vector<codec::PacketLimits> limits,
                       bool carry, Seq late_ops)
    : memory_(kUnbounded),
      roster_(shape, 0),
      attendance_(roster_, false, 1),
      values_(make_values(codec, false)),
      carry_(carry, true, late_ops, false, counters_),
      context_(shape, codec, std::move(limits), false, epochs_, roster_, attendance_, audience_, memory_,
               *values_, carry_, scratch_) {
    carry_.admit_by(*this);
}

// Of an op that may be over here.
Plan ReplayCore::late_plan(const wire::Header& header) const {
    const Plan plan =
        context_.plan(header.seq, {header.bucket_len, header.key, epochs_.at(header.seq).number});
    check(header, plan);
    return plan;
}

void ReplayCore::take_late(std::span<const std::byte> contribution, const Runs& runs, const Cuts& cuts) {
    each_part(contribution, runs, cuts, [&](const wire::Header& header, std::span<const std::byte> payload) {
        carry_.contribute(late_plan(header), header, payload);
    });
}

void ReplayCore::admit(Seq user, Seq seq, Rank rank, bool subtracted, const Runs& runs) {
    Runs& admitted = admitted_[{user, seq, rank, subtracted}];
    admitted.insert(admitted.end(), runs.begin(), runs.end());
}

void ReplayCore::keep_admitted(Seq user, Seq seq, Rank rank, bool subtracted, GranuleSet& due) const {
    GranuleSet admitted = due;
    admitted.remove(due);
    if (const auto at = admitted_.find({user, seq, rank, subtracted}); at != admitted_.end())
        for (const auto& [first, last] : at->second) admitted.set(first, std::min(last, due.capacity()));
    due.keep_only(admitted);
}

void ReplayCore::take_late_means(std::span<const std::byte> mean, const Runs& runs) {
    each_part(mean, runs, {}, [&](const wire::Header& header, std::span<const std::byte> payload) {
        carry_.place(kNow, late_plan(header), header, payload);
    });
}

void ReplayCore::begin(Seq seq, std::uint32_t length, const Terms& terms) {
    terms_[seq] = terms;
    const Plan plan = context_.plan(seq, {length, terms.key, context_.epochs.at(seq).number});
    auto& op = ops_[seq] = std::make_unique<Op>(context_, plan, terms.gather);
    op->own(memory_.take(op->own_floats()));
    op->set_loss_scale_tag(terms.loss_scale_tag);
}

void ReplayCore::close_part(Seq seq, const Runs& runs) {
    const std::uint32_t granules = op(seq).layout().granules(op(seq).own_shard());
    for (const auto& [first, last] : runs) op(seq).close(kNow, first, std::min(last, granules));
}

void ReplayCore::enter(Seq seq, std::span<float> bucket, bool contributing, std::span<float> residue) {
    Terms& terms = terms_.at(seq);
    terms.residue = residue;
    const Plan plan = context_.plan(seq, op(seq).bucket());
    carry_.enter(plan);
    if (contributing) carry_.hand_over(plan, terms.loss_scale_tag, bucket);
    op(seq).enter(kNow, 0, bucket, terms, contributing);
}

ReplayCore::Bytes ReplayCore::contribution(Seq seq, Rank peer) {
    Bytes bytes;
    Outgoing out;
    while (op(seq).owes(peer) && op(seq).next_packet(kNow, peer, out)) {
        if (out.header.empty()) continue;  // it abstains
        append(bytes, out, context_.shape.self);
        op(seq).note_delivered(peer, out.parcel);
    }
    return bytes;
}

void ReplayCore::deliver(Seq seq, std::span<const std::byte> contribution, const Runs& runs,
                         const Cuts& cuts) {
    each_part(contribution, runs, cuts, [&](const wire::Header& header, std::span<const std::byte> payload) {
        check(header, context_.plan(seq, op(seq).bucket()));
        op(seq).scatter(kNow, header, payload, kNow);
    });
}

void ReplayCore::close(Seq seq) { op(seq).close(kNow, Ending::kBound, 0); }

ReplayCore::Bytes ReplayCore::mean(Seq seq, Rank peer) {
    Bytes bytes;
    Outgoing out;
    while (op(seq).next_packet(kNow, peer, out))  // contributions that nobody has used come first
        if (out.header.stage() == wire::Stage::kGather) append(bytes, out, context_.shape.self);
    return bytes;
}

void ReplayCore::place(Seq seq, std::span<const std::byte> mean, const Runs& runs, const Cuts& cuts) {
    each_part(mean, runs, cuts, [&](const wire::Header& header, std::span<const std::byte> payload) {
        check(header, context_.plan(seq, op(seq).bucket()));
        if (!header.empty()) op(seq).gather(kNow, header, payload);
    });
}

void ReplayCore::place_empty(Seq seq, Rank shard, const Runs& runs) {
    const Layout& layout = op(seq).layout();
    const std::uint32_t granules = layout.granules(shard);
    for (const auto& [first, last] : runs)
        for (std::uint32_t at = first, end; at < std::min(last, granules); at = end) {
            end = std::min({last, granules, at + kMostEmptyGranules});
            wire::Header header;
            header.flags = wire::kGatherStage | wire::kEmpty;
            header.seq = seq;
            header.shard = shard;
            header.source = context_.plan(seq, op(seq).bucket()).owner(shard);
            header.first = at * kGranule;
            header.count = static_cast<std::uint16_t>(layout.coords(shard, at, end));
            op(seq).gather(kNow, header, {});
        }
}

OpReport ReplayCore::end(Seq seq, Status status, std::vector<float> shares) {
    const StandIn stand_in{true, std::move(shares)};
    OpReport report = op(seq).end(kNow, status, Ending::kAll, false, true, &stand_in);
    if (ReceivedMeans means = op(seq).take_means(); context_.carries(means.plan())) {
        means.reopen();
        if (!op(seq).non_finite() && means.lacking()) carry_.keep(std::move(means));
    }
    drop(seq);
    carry_.retire(seq + 1);
    return report;
}

void ReplayCore::drop(Seq seq) {
    ops_.erase(seq);
    terms_.erase(seq);
    admitted_.erase(admitted_.lower_bound({seq, 0, 0, false}), admitted_.lower_bound({seq + 1, 0, 0, false}));
}

}  // namespace tailcut
