#include "protocol/ops/op.hpp"

#include <algorithm>
#include <limits>
#include <utility>

#include "codec/raw.hpp"

namespace tailcut {
namespace {

constexpr std::uint32_t kMaxRunGranules = 0xFFFF / kGranule;  // Header::count is 16 bits

}  // namespace

Op::Op(const OpContext& context, const Plan& plan, const Coding& gather)
    : context_(context),
      shape_(context.shape),
      plan_(plan),
      gather_(gather),
      sent_(shape_.ranks),
      steps_(shape_.ranks) {
    for (Rank shard = 0; shard < shape_.ranks; ++shard) total_granules_ += plan_.layout.granules(shard);
}

void Op::own(Block memory) {
    owned_.emplace(context_, plan_.layout.granules(own_shard()),
                   context_.values.reduction(context_, plan_, gather_, std::move(memory)));
}

void Op::enter(Time now, Ticket ticket, std::span<float> bucket, const Terms& terms, bool contributing) {
    entered_ = true;
    contributing_ = contributing;
    bucket_ = bucket;
    bounds_ = terms.bounds;
    scatter_ = terms.scatter;
    // A mean has one coding: if some of it is final, the coding was chosen before.
    if (owned_->final_granules() == 0) gather_ = terms.gather;
    skip_above_ = terms.skip_above;
    entered_at_ = now;
    deadline_ = now + terms.bounds.deadline;
    loss_scale_tag_ = terms.loss_scale_tag;
    report_.ticket = ticket;
    if (!holds()) hold({});
    means_->enter(now, bucket);
    contributions_ = context_.values.contributions(context_, plan_, scatter_, bucket);
    for (Rank peer = 0; peer < shape_.ranks; ++peer)
        if (peer != shape_.self) steps_[peer] = contributions_->steps(plan_.shard_of(peer));
    owned_->enter(now, bucket.data() + plan_.layout.begin(own_shard()), contributing, gather_);
}

std::optional<wire::Reject> Op::scatter(Time now, const wire::Header& header,
                                        std::span<const std::byte> payload, Time source_entered_at) {
    non_finite_.hear(header);
    owned_->note_entry(header.source, source_entered_at);
    if (header.empty()) {
        if (owned_->abstained(header.source)) return wire::Reject::kDuplicate;
        if (header.flags & wire::kOver)
            owned_->peer_ended(header.source, now);
        else
            owned_->abstain(header.source, now);
        return std::nullopt;
    }
    report_.traffic.trimmed_packets += payload.size() < wire::stated_payload_bytes(header);
    const std::uint32_t first = header.first / kGranule;
    const std::uint32_t last = first + wire::delivered_granules(header, payload.size());
    return owned_->contribute(header, first, last, payload, now);
}

std::optional<wire::Reject> Op::gather(Time now, const wire::Header& header,
                                       std::span<const std::byte> payload) {
    const auto reason = means_->place(now, header, payload);
    if (reason) return reason;
    non_finite_.hear(header);
    report_.traffic.trimmed_packets += payload.size() < wire::stated_payload_bytes(header);
    return std::nullopt;
}

void Op::abstain(Rank rank, Time now) {
    if (owned_) owned_->abstain(rank, now);
}

void Op::peer_left(Rank rank, Time now) {
    if (owned_) owned_->peer_left(rank, now);
}

void Op::evict(Time now) {
    own({});
    owned_->close(now, Ending::kDeadline);
    owned_->leave_rest_empty();
}

void Op::reduce_more(bool non_finite) {
    if (owned_->reduced()) return;
    non_finite_.note(non_finite);
    owned_->reduce_more();
}

// When the own shard was reduced and the last parts of all means had come, except those of silent owners.
Time Op::gathered_at() const {
    const Time last_parts = owned_->reduced() ? means_->last_parts_at() : kNever;
    return last_parts == kNever ? kNever : std::max(last_parts, owned_->closed_at());
}

StageEnd Op::end_at() const {
    if (!entered_ || ended_) return {};
    StageEnd end{deadline_, Ending::kDeadline};
    // A rank that hears nobody, not even answers, is cut off: it and the others do not wait for each other.
    const bool deaf = context_.roster.heard_at() < entered_at_;
    const Time majority = deaf ? entered_at_ : owned_->clock().majority_entered_at();
    const Duration grace = std::max(bounds_.gather_grace, context_.roster.repeat_time());
    if (majority >= 0) {  // a late rank fetches what there is, in a round trip or two
        const Duration fetch = std::max(bounds_.gather_grace, context_.roster.repeat_time() / 4);
        const Time bound = std::max(entered_at_ + fetch, majority + bounds_.scatter + bounds_.gather);
        if (bound < end.at) end = {bound, Ending::kBound};
    }
    const Time gathered = gathered_at();
    if (gathered != kNever && gathered + grace < end.at) end = {gathered + grace, Ending::kGrace};
    return end;
}

bool Op::next_packet(Time now, Destination to, Outgoing& out) {
    out = {};
    // Contributions come first: owners wait for the last of them, and means can use the rest of the uplink.
    // So does the word that we have ended the op: it stops means that would come too late.
    const bool found = (unsent(to) && next_contribution(to.rank(), out)) ||
                       (owned_ && next_mean(to, owned_->pending(to), out));
    if (found) complete_header(now, to, out);
    return found;
}

bool Op::next_late(Time now, Rank peer, Outgoing& out) {
    out = {};
    if (!late(peer)) return false;
    next_mean(peer, owned_->late(peer), out);
    complete_header(now, peer, out);
    return true;
}

bool Op::repeat(Time now, Rank peer, const Parcel& parcel, Outgoing& out) {
    out = {};
    if (parcel.stage == wire::Stage::kGather) {
        if (owned_->has_ended(peer)) return false;
        put_mean(peer, {parcel.first, parcel.first + parcel.granules, parcel.empty}, out);
    } else if (parcel.empty) {
        put_end(peer, out);
    } else {
        const Rank shard = plan_.shard_of(peer);
        std::uint32_t step = parcel.first;
        out.header.shard = shard;
        if (ended_ || !contributions_->next(shard, means_->answered(shard), step, out)) return false;
    }
    if (parcel.last_part) out.header.flags |= wire::kLastPart;
    complete_header(now, peer, out);
    out.parcel = parcel;
    out.again = true;
    return true;
}

void Op::complete_header(Time now, Destination to, Outgoing& out) const {
    out.to = to;
    if (to.is_everybody()) out.header.flags |= wire::kMulticast;
    out.header.seq = out.parcel.seq = plan_.seq;
    out.header.bucket_len = plan_.bucket.length;
    out.header.key = plan_.bucket.key;
    out.parcel.bucket = plan_.bucket;
    out.parcel.stage = out.header.stage();
    out.parcel.empty = out.header.empty();
    out.parcel.last_part = out.header.flags & wire::kLastPart;
    if (entered_)
        out.header.entry_us = static_cast<std::uint32_t>(
            std::min<Duration>((now - entered_at_) / kMicrosecond, wire::kNotEntered - 1));
    out.header.loss_scale_tag = loss_scale_tag_;
    non_finite_.mark(out.header, owned_ && owned_->non_finite());
}

bool Op::pending(Destination to) const { return (owned_ && owned_->pending(to)) || unsent(to); }

bool Op::next_mean(Destination to, const std::optional<Run>& run, Outgoing& out) {
    if (!run) return false;
    out.rewind = owned_->cursor(to);
    const std::uint32_t granules = put_mean(to, *run, out);
    owned_->advance(to, granules);
    out.parcel.first = run->first;
    out.parcel.granules = granules;
    if (!owned_->sent_all(to)) return true;
    out.header.flags |= wire::kLastPart;
    // Rule 10: the last packet of the own mean must say whether the own bucket holds an Inf or a NaN.
    if (entered_ && !ended_) search_bucket();
    return true;
}

// Puts the first packet of a run of the own mean; returns its granules.
std::uint32_t Op::put_mean(Destination to, const Run& run, Outgoing& out) {
    const Rank shard = own_shard();
    const std::uint32_t all = plan_.layout.granules(shard);
    out.header.flags = wire::kGatherStage | (run.empty ? wire::kEmpty : 0);
    out.header.shard = shard;
    out.header.first = run.first * kGranule;
    if (!run.empty) return owned_->packet(to, run, out);
    const bool whole = run.first == 0 && run.last == all;
    const std::uint32_t granules = whole ? all : std::min(run.last - run.first, kMaxRunGranules);
    const std::uint32_t coords = plan_.layout.coords(shard, run.first, run.first + granules);
    out.header.count = whole ? 0 : static_cast<std::uint16_t>(coords);
    return granules;
}

bool Op::next_contribution(Rank peer, Outgoing& out) {
    const Rank shard = plan_.shard_of(peer);
    std::uint32_t& sent = sent_[peer];
    out.rewind = {0, sent};
    const bool empty = ended_ || !contributing_ || plan_.layout.length(shard) == 0;
    if (empty && unsent(peer)) {
        put_end(peer, out);
        sent = steps_[peer];
        return true;
    }
    out.header.shard = shard;
    while (unsent(peer)) {
        out.rewind = {0, sent};
        out.parcel.first = sent;
        if (!contributions_->next(shard, means_->answered(shard), sent, out)) continue;
        if (!unsent(peer)) out.header.flags |= wire::kLastPart;
        non_finite_.hear(out.header);
        return true;
    }
    return false;
}

// Sent in place of a contribution: there is none, or this rank has ended the op.
void Op::put_end(Rank peer, Outgoing& out) {
    out.header.shard = plan_.shard_of(peer);
    out.header.flags = wire::kEmpty | wire::kLastPart | (ended_ ? wire::kOver : 0);
}

void Op::retract(const Outgoing& out) {
    if (out.again) return;
    if (out.header.stage() == wire::Stage::kGather) {
        owned_->rewind(out.to, out.rewind);
    } else {
        sent_[out.to.rank()] = out.rewind.granule;
        if (contributions_) contributions_->retract(out);
    }
}

void Op::search_bucket() {
    non_finite_.search_once([&] {
        for (Rank peer = 0; contributing_ && peer < shape_.ranks; ++peer) {
            if (peer == shape_.self) continue;  // the own shard's values show in its mean
            const Rank shard = plan_.shard_of(peer);
            const std::uint32_t seen =
                plan_.layout.coords(shard, 0, contributions_->first_unseen(shard, sent_[peer]));
            if (codec::has_non_finite(
                    bucket_.subspan(plan_.layout.begin(shard) + seen, plan_.layout.length(shard) - seen)))
                return true;
        }
        return false;
    });
}

OpReport Op::end(Time now, Status status, Ending ending, bool awaited, bool record_fates) {
    owned_->leave_rest_empty();
    owned_->hand_back(awaited);
    search_bucket();
    means_->end();
    report_.energies = contributions_->energies();
    contributions_.reset();
    if (non_finite()) NonFinite::put_into(bucket_);
    if (status == Status::kBehind) {  // a rank whose parameters are old applies no mean
        if (!context_.elided) std::fill(bucket_.begin(), bucket_.end(), 0.0f);
        means_->drop();
    }
    ended_ = true;
    // Owners whose whole mean we have need no word from us; the others are told that we have ended the op.
    for (Rank peer = 0; peer < shape_.ranks; ++peer) {
        const Rank shard = plan_.shard_of(peer);
        sent_[peer] = means_->has_all(shard) ? steps_[peer] : 0;
    }
    fill_report(now, status, ending);
    if (record_fates) this->record_fates(status);
    return std::move(report_);
}

}  // namespace tailcut
