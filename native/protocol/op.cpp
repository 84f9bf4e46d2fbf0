#include "protocol/op.hpp"

#include <algorithm>
#include <limits>
#include <utility>

#include "codec/raw.hpp"

namespace tailcut {
namespace {

constexpr std::uint32_t kMaxRunGranules = 0xFFFF / kGranule;  // Header::count is 16 bits

std::uint32_t granules_of(std::uint32_t coords) { return (coords + kGranule - 1) / kGranule; }

}  // namespace

Op::Op(OpContext& context, Seq seq, std::uint32_t bucket_len, int planes)
    : context_(context),
      shape_(context.shape),
      seq_(seq),
      layout_{bucket_len, shape_.ranks},
      planes_(planes),
      sent_(shape_.ranks),
      steps_(shape_.ranks) {
    for (Rank shard = 0; shard < shape_.ranks; ++shard) total_granules_ += layout_.granules(shard);
}

void Op::own(Block memory) {
    owned_.emplace(shape_, layout_.granules(own_shard()),
                   make_reduction(context_, seq_, layout_, planes_, std::move(memory)));
}

void Op::hold(Block memory) {
    means_ = make_means(context_, seq_, layout_, std::move(memory));
    for (Rank shard = 0; shard < shape_.ranks; ++shard) {
        answered_.emplace_back(layout_.granules(shard));
        held_.emplace_back(layout_.granules(shard));
    }
}

void Op::enter(Time now, Ticket ticket, std::span<float> bucket, const Terms& terms, bool contributing) {
    entered_ = true;
    contributing_ = contributing;
    bucket_ = bucket;
    bounds_ = terms.bounds;
    planes_ = terms.planes;
    entered_at_ = now;
    deadline_ = now + terms.bounds.deadline;
    report_.ticket = ticket;
    if (!holds()) hold({});
    means_->enter(bucket, held_);
    contributions_ = make_contributions(context_, seq_, layout_, planes_, bucket);
    for (Rank peer = 0; peer < shape_.ranks; ++peer)
        if (peer != shape_.self) steps_[peer] = contributions_->steps(shape_.shard_of(peer, seq_));
    owned_->enter(now, bucket.data() + layout_.begin(own_shard()), contributing, planes_);
}

std::optional<wire::Reject> Op::scatter(Time now, const wire::Header& header,
                                        std::span<const std::byte> payload, Time source_entered_at) {
    non_finite_ |= (header.flags & wire::kNonFinite) != 0;
    owned_->note_entry(header.source, source_entered_at);
    if (header.empty()) {
        if (owned_->abstained(header.source)) return wire::Reject::kDuplicate;
        if (header.flags & wire::kOver)
            owned_->end(header.source, now);
        else
            owned_->abstain(header.source, now);
        return std::nullopt;
    }
    report_.trimmed_packets += payload.size() < wire::stated_payload_bytes(header);
    const std::uint32_t first = header.first / kGranule;
    const std::uint32_t last = first + wire::delivered_granules(header, payload.size());
    if (first == last) return std::nullopt;
    return owned_->contribute(header, first, last, payload, now);
}

std::optional<wire::Reject> Op::gather(const wire::Header& header, std::span<const std::byte> payload) {
    const Rank shard = header.shard;
    const bool whole = header.count == 0;
    const std::uint32_t first = header.first / kGranule;
    std::uint32_t last = whole ? layout_.granules(shard) : first + granules_of(header.count);
    if (answered_[shard].any(first, last)) return wire::Reject::kDuplicate;
    non_finite_ |= (header.flags & wire::kNonFinite) != 0;
    if (!header.empty()) {
        report_.trimmed_packets += payload.size() < wire::stated_payload_bytes(header);
        last = first + wire::delivered_granules(header, payload.size());
        if (first == last) return std::nullopt;
        means_->place(header, first, last, payload);
        held_[shard].set(first, last);
    }
    answered_[shard].set(first, last);
    answered_count_ += last - first;
    means_->settle(shard, first, last, answered_[shard], held_[shard]);
    return std::nullopt;
}

void Op::abstain(Rank rank, Time now) {
    if (owned_) owned_->abstain(rank, now);
}

void Op::forsake(Rank owner) {
    const Rank shard = shape_.shard_of(owner, seq_);
    const std::uint32_t granules = layout_.granules(shard);
    answered_count_ += granules - answered_[shard].count(0, granules);
    answered_[shard].set(0, granules);
}

void Op::forfeit(Time now) {
    own({});
    owned_->close(now);
}

bool Op::next_packet(Time now, Rank peer, Outgoing& out) {
    out.header = {};
    out.keeper.reset();
    // Means come first: they end ops. But the word that we have ended this one stops means that come too late.
    const bool found = finished_ ? next_contribution(peer, out) || next_mean(peer, out)
                                 : next_mean(peer, out) || next_contribution(peer, out);
    if (!found) return false;
    out.peer = peer;
    out.header.seq = seq_;
    out.header.bucket_len = layout_.bucket_len;
    if (entered_)
        out.header.entry_us = static_cast<std::uint32_t>(
            std::min<Duration>((now - entered_at_) / kMicrosecond, wire::kNotEntered - 1));
    if (non_finite()) out.header.flags |= wire::kNonFinite;
    return true;
}

bool Op::pending(Rank peer) const { return (owned_ && owned_->pending(peer)) || unsent(peer); }

bool Op::next_mean(Rank peer, Outgoing& out) {
    const auto run = owned_ ? owned_->pending(peer) : std::nullopt;
    if (!run) return false;
    const Rank shard = own_shard();
    const std::uint32_t all = layout_.granules(shard);
    out.rewind = owned_->cursor(peer);
    out.header.flags = wire::kGatherStage | (run->empty ? wire::kEmpty : 0);
    out.header.shard = shard;
    out.header.first = run->first * kGranule;
    std::uint32_t granules;
    if (run->empty) {
        const bool whole = run->first == 0 && run->last == all;
        granules = whole ? all : std::min(run->last - run->first, kMaxRunGranules);
        const std::uint32_t coords = layout_.coords(shard, run->first, run->first + granules);
        out.header.count = whole ? 0 : static_cast<std::uint16_t>(coords);
        out.payload = {};
    } else {
        granules = owned_->packet(peer, *run, out);
    }
    owned_->advance(peer, granules);
    // Rule 10: the last packet of the own mean must know what the own bucket holds.
    if (owned_->served(peer) && entered_ && !finished_) scan_unsent();
    return true;
}

bool Op::next_contribution(Rank peer, Outgoing& out) {
    const Rank shard = shape_.shard_of(peer, seq_);
    std::uint32_t& sent = sent_[peer];
    out.header.shard = shard;
    out.rewind = {0, sent};
    const bool empty = finished_ || !contributing_ || layout_.length(shard) == 0;
    if (empty && unsent(peer)) {
        out.header.flags = wire::kEmpty | (finished_ ? wire::kOver : 0);
        out.payload = {};
        sent = steps_[peer];
        return true;
    }
    while (unsent(peer)) {
        out.rewind = {0, sent};
        if (!contributions_->next(shard, answered_[shard], sent, out)) continue;
        non_finite_ |= (out.header.flags & wire::kNonFinite) != 0;
        return true;
    }
    return false;
}

void Op::retract(const Outgoing& out) {
    if (out.header.stage() == wire::Stage::kGather) {
        owned_->rewind(out.peer, out.rewind);
    } else {
        sent_[out.peer] = out.rewind.granule;
        if (contributions_) contributions_->retract(out);
    }
}

void Op::scan_unsent() {
    if (std::exchange(scanned_, true)) return;
    for (Rank peer = 0; contributing_ && !non_finite_ && peer < shape_.ranks; ++peer) {
        if (peer == shape_.self) continue;  // the own shard is seen in its mean
        const Rank shard = shape_.shard_of(peer, seq_);
        const std::uint32_t at = layout_.coords(shard, 0, contributions_->first_unseen(shard, sent_[peer]));
        non_finite_ =
            codec::has_non_finite(bucket_.subspan(layout_.begin(shard) + at, layout_.length(shard) - at));
    }
}

OpReport Op::finish(Time now, Status status, bool record_fates) {
    owned_->close(now);  // the own contribution leaves with the bucket
    owned_->leave();
    scan_unsent();
    means_->finish(own_shard(), held_);
    contributions_.reset();
    // Rule 10: whoever checks gradients for Inf and NaN finds one, whichever packets were lost.
    if (non_finite() && !bucket_.empty()) bucket_[0] = std::numeric_limits<float>::quiet_NaN();
    if (status == Status::kBehind) {  // nothing is reduced for a rank whose parameters are old
        std::fill(bucket_.begin(), bucket_.end(), 0.0f);
        for (Rank shard = 0; shard < shape_.ranks; ++shard)
            held_[shard] = GranuleSet(layout_.granules(shard));
    }
    finished_ = true;
    // An owner whose mean we have needs no word; the others are told that we have ended.
    for (Rank peer = 0; peer < shape_.ranks; ++peer) {
        const Rank shard = shape_.shard_of(peer, seq_);
        sent_[peer] = answered_[shard].all(0, layout_.granules(shard)) ? steps_[peer] : 0;
    }
    fill_report(now, status, record_fates);
    return std::move(report_);
}

void Op::fill_report(Time now, Status status, bool record_fates) {
    report_.status = status;
    report_.seq = seq_;
    report_.bucket_len = layout_.bucket_len;
    report_.own_shard = own_shard();
    report_.non_finite = non_finite();
    report_.contributed = contributing_;
    report_.planes = context_.codec == wire::Codec::kPlanes ? planes_ : 0;
    report_.entered_at = entered_at_;
    report_.scatter_closed_at = owned_->closed_at();
    report_.finished_at = now;
    const auto missing = [&](Rank shard, const GranuleSet& set) {
        std::uint32_t coords = 0;
        for (std::uint32_t g = 0, last, all = layout_.granules(shard); g < all; g = last) {
            last = set.run_end(g, all);
            if (!set.test(g)) coords += layout_.coords(shard, g, last);
        }
        return coords;
    };
    report_.scatter_missing.assign(shape_.ranks, 0);
    report_.gather_missing.assign(shape_.ranks, 0);
    report_.gather_empty.assign(shape_.ranks, 0);
    for (Rank rank = 0; rank < shape_.ranks; ++rank) {
        const Rank shard = shape_.shard_of(rank, seq_);
        report_.shard_lengths.push_back(layout_.length(shard));
        report_.scatter_missing[rank] = missing(own_shard(), owned_->arrived(rank));
        if (owned_->abstained(rank)) report_.abstained.push_back(rank);
        if (rank == shape_.self) continue;
        report_.gather_missing[rank] = missing(shard, answered_[shard]);
        report_.gather_empty[rank] = missing(shard, held_[shard]) - report_.gather_missing[rank];
    }
    for (const Run& run : owned_->runs())
        if (run.empty) report_.gather_empty[shape_.self] += layout_.coords(own_shard(), run.first, run.last);
    if (record_fates) {
        for (Rank rank = 0; rank < shape_.ranks; ++rank)
            report_.contributions.push_back(owned_->arrived(rank));
        report_.held = held_;
        report_.held[own_shard()] = GranuleSet(layout_.granules(own_shard()));
        for (const Run& run : owned_->runs())
            if (!run.empty && status != Status::kBehind) report_.held[own_shard()].set(run.first, run.last);
    }
}

}  // namespace tailcut
