#include "protocol/op.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "codec/raw.hpp"

namespace tailcut {
namespace {

constexpr std::uint32_t kMaxRunGranules = 0xFFFF / kGranule;  // Header::count is 16 bits

std::uint32_t granules_of(std::uint32_t coords) { return (coords + kGranule - 1) / kGranule; }

bool cut(const wire::Header& header, std::span<const std::byte> payload) {
    return payload.size() < wire::stated_payload_bytes(header);
}

// A cut packet counts for the granules that it still holds whole.
std::uint32_t delivered_granules(const wire::Header& header, std::span<const std::byte> payload) {
    return cut(header, payload) ? static_cast<std::uint32_t>(payload.size() / (kGranule * sizeof(float)))
                                : granules_of(header.count);
}

}  // namespace

Op::Op(const Shape& shape, Seq seq, std::uint32_t bucket_len)
    : shape_(shape), seq_(seq), layout_{bucket_len, shape.ranks}, sent_(shape.ranks) {
    for (Rank shard = 0; shard < shape.ranks; ++shard) total_granules_ += layout_.granules(shard);
}

void Op::own(Block memory) { owned_.emplace(shape_, layout_, own_shard(), std::move(memory)); }

void Op::hold(Block memory) {
    result_ = std::move(memory);
    for (Rank shard = 0; shard < shape_.ranks; ++shard) {
        answered_.emplace_back(layout_.granules(shard));
        held_.emplace_back(layout_.granules(shard));
    }
}

void Op::enter(Time now, Ticket ticket, std::span<float> bucket, const Bounds& bounds, bool contributing) {
    entered_ = true;
    contributing_ = contributing;
    bucket_ = bucket;
    bounds_ = bounds;
    entered_at_ = now;
    deadline_ = now + bounds.deadline;
    report_.ticket = ticket;
    if (!holds()) hold({});
    take_over_held();
    owned_->enter(now, bucket.data() + layout_.begin(own_shard()), contributing);
}

// Results that came before the entry: from the pool, and the own shard if it was closed without us.
void Op::take_over_held() {
    for (Rank shard = 0; result_ && shard < shape_.ranks; ++shard)
        for (std::uint32_t g = 0, last; g < layout_.granules(shard); g = last) {
            last = held_[shard].run_end(g, layout_.granules(shard));
            if (!held_[shard].test(g)) continue;
            const std::uint64_t at = layout_.begin(shard) + g * kGranule;
            std::memcpy(bucket_.data() + at, result_.data() + at,
                        layout_.coords(shard, g, last) * sizeof(float));
        }
    result_ = {};
    for (const Run& run : owned_->runs())
        if (!run.empty)
            std::memcpy(bucket_.data() + layout_.begin(own_shard()) + run.first * kGranule,
                        owned_->mean() + run.first * kGranule,
                        layout_.coords(own_shard(), run.first, run.last) * sizeof(float));
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
    report_.trimmed_packets += cut(header, payload);
    const std::uint32_t first = header.first / kGranule;
    const std::uint32_t last = first + delivered_granules(header, payload);
    if (first == last) return std::nullopt;
    const std::size_t bytes = layout_.coords(own_shard(), first, last) * sizeof(float);
    return owned_->contribute(header.source, first, last, payload.first(bytes), now);
}

std::optional<wire::Reject> Op::gather(const wire::Header& header, std::span<const std::byte> payload) {
    const Rank shard = header.shard;
    const bool whole = header.count == 0;
    const std::uint32_t first = header.first / kGranule;
    std::uint32_t last = whole ? layout_.granules(shard) : first + granules_of(header.count);
    if (answered_[shard].any(first, last)) return wire::Reject::kDuplicate;
    non_finite_ |= (header.flags & wire::kNonFinite) != 0;
    if (!header.empty()) {
        report_.trimmed_packets += cut(header, payload);
        last = first + delivered_granules(header, payload);
        const std::size_t bytes = layout_.coords(shard, first, last) * sizeof(float);
        float* base = entered_ ? bucket_.data() : result_.data();
        std::memcpy(base + layout_.begin(shard) + header.first, payload.data(), bytes);
        held_[shard].set(first, last);
    }
    answered_[shard].set(first, last);
    answered_count_ += last - first;
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

bool Op::next_packet(Time now, Rank peer, std::uint32_t max_granules, Outgoing& out) {
    out.header = {};
    // Means come first: they end ops. But the word that we have ended this one stops means that come too late.
    const bool found = finished_
                           ? next_contribution(peer, max_granules, out) || next_mean(peer, max_granules, out)
                           : next_mean(peer, max_granules, out) || next_contribution(peer, max_granules, out);
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

bool Op::next_mean(Rank peer, std::uint32_t max_granules, Outgoing& out) {
    const auto run = owned_ ? owned_->pending(peer) : std::nullopt;
    if (!run) return false;
    const Rank shard = own_shard();
    const std::uint32_t all = layout_.granules(shard);
    const bool whole = run->empty && run->first == 0 && run->last == all;
    std::uint32_t granules = run->last - run->first;
    if (!whole) granules = std::min(granules, run->empty ? kMaxRunGranules : max_granules);

    // Rule 10: the last packet of the own mean must know what the own bucket holds.
    if (run->first + granules == all && entered_ && !finished_) scan_unsent();

    out.rewind = owned_->cursor(peer);
    out.header.flags = wire::kGatherStage | (run->empty ? wire::kEmpty : 0);
    out.header.shard = shard;
    out.header.first = run->first * kGranule;
    const std::uint32_t coords = layout_.coords(shard, run->first, run->first + granules);
    out.header.count = whole ? 0 : static_cast<std::uint16_t>(coords);
    out.payload = run->empty ? std::span<const std::byte>{}
                             : std::as_bytes(std::span(owned_->mean() + out.header.first, coords));
    owned_->advance(peer, granules);
    return true;
}

bool Op::next_contribution(Rank peer, std::uint32_t max_granules, Outgoing& out) {
    if (!entered_) return false;
    const Rank shard = shape_.shard_of(peer, seq_);
    const std::uint32_t all = layout_.granules(shard);
    std::uint32_t& sent = sent_[peer];
    const bool empty = finished_ || !contributing_ || layout_.length(shard) == 0;
    if (empty && sent < all) {
        out.header.flags = wire::kEmpty | (finished_ ? wire::kOver : 0);
        out.header.shard = shard;
        out.payload = {};
        out.rewind = {0, sent};
        sent = all;
        return true;
    }
    while (sent < all) {
        const std::uint32_t first = sent, last = std::min(all, first + max_granules);
        sent = last;
        // Rule 2: no contribution to what the owner has already sent back. It would also read the mean.
        if (answered_[shard].any(first, last)) continue;
        const std::uint32_t coords = layout_.coords(shard, first, last);
        const std::span<const float> values(bucket_.data() + layout_.begin(shard) + first * kGranule, coords);
        non_finite_ = non_finite_ || (!scanned_ && codec::has_non_finite(values));
        out.header.flags = 0;
        out.header.shard = shard;
        out.header.first = first * kGranule;
        out.header.count = static_cast<std::uint16_t>(coords);
        out.payload = std::as_bytes(values);
        out.rewind = {0, first};
        return true;
    }
    return false;
}

void Op::retract(const Outgoing& out) {
    if (out.header.stage() == wire::Stage::kGather)
        owned_->rewind(out.peer, out.rewind);
    else
        sent_[out.peer] = out.rewind.granule;
}

void Op::scan_unsent() {
    if (std::exchange(scanned_, true)) return;
    for (Rank peer = 0; contributing_ && !non_finite_ && peer < shape_.ranks; ++peer) {
        if (peer == shape_.self) continue;  // the own shard is seen in its mean
        const Rank shard = shape_.shard_of(peer, seq_);
        const std::uint32_t at = std::min(layout_.length(shard), sent_[peer] * kGranule);
        non_finite_ =
            codec::has_non_finite(bucket_.subspan(layout_.begin(shard) + at, layout_.length(shard) - at));
    }
}

void Op::zero_what_is_missing() {
    const auto zero = [&](Rank shard, std::uint32_t first, std::uint32_t last) {
        std::fill_n(bucket_.data() + layout_.begin(shard) + first * kGranule,
                    layout_.coords(shard, first, last), 0.0f);
    };
    for (Rank shard = 0; shard < shape_.ranks; ++shard) {
        if (shard == own_shard()) continue;
        for (std::uint32_t g = 0, last; g < layout_.granules(shard); g = last) {
            last = held_[shard].run_end(g, layout_.granules(shard));
            if (!held_[shard].test(g)) zero(shard, g, last);
        }
    }
    for (const Run& run : owned_->runs())
        if (run.empty) zero(own_shard(), run.first, run.last);
}

OpReport Op::finish(Time now, Status status, bool record_fates) {
    owned_->close(now);  // the own contribution leaves with the bucket
    owned_->leave();
    scan_unsent();
    zero_what_is_missing();
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
        const std::uint32_t all = layout_.granules(shard);
        sent_[peer] = peer == shape_.self || answered_[shard].all(0, all) ? all : 0;
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
