#include "protocol/ops/op.hpp"

#include <algorithm>
#include <limits>
#include <utility>

#include "protocol/carry/carry.hpp"

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
      steps_(shape_.ranks),
      end_due_(shape_.ranks) {
    for (Rank shard = 0; shard < shape_.ranks; ++shard) total_granules_ += plan_.layout.granules(shard);
}

void Op::own(Block memory) {
    owned_.emplace(context_, plan_, context_.values.reduction(context_, plan_, gather_, std::move(memory)));
    if (!reliable_.empty()) owned_->set_reliable(reliable_[own_shard()]);
}

void Op::set_reliable(std::span<const CoordRun> runs) {
    reliable_ = reliable_granules(plan_.layout, runs);
    if (!owned_) return;
    const std::uint32_t granules = plan_.layout.granules(own_shard());
    owned_->set_reliable(reliable_.empty() ? GranuleSet(granules) : reliable_[own_shard()]);
}

void Op::enter(Time now, Ticket ticket, std::span<float> bucket, const Terms& terms, bool contributing) {
    entered_ = true;
    contributing_ = contributing;
    fetches_ = !terms.contribute && context_.roster.behind_ops(plan_.seq) > 0;
    bucket_ = bucket;
    bounds_ = terms.bounds;
    scatter_ = terms.scatter;
    // A mean has one coding: if some of it is final, the coding was chosen before.
    if (owned_->final_granules() == 0) gather_ = terms.gather;
    skip_above_ = terms.skip_above;
    entered_at_ = now;
    deadline_ = now + terms.bounds.deadline;
    loss_scale_tag_ = terms.loss_scale_tag;
    owned_->set_loss_scale_tag(loss_scale_tag_);
    set_reliable(terms.reliable);
    report_.ticket = ticket;
    report_.terms = terms;
    report_.terms.residue = {};
    if (!holds()) hold({});
    contributions_ = context_.values.contributions(context_, plan_, scatter_, bucket);
    if (carrying()) take_in(terms.residue);
    for (Rank peer = 0; peer < shape_.ranks; ++peer)
        if (const Rank shard = plan_.shard_of(peer); peer != shape_.self && plan_.layout.owned(shard))
            steps_[peer] = contributions_->steps(shard);
    for (Rank shard = 0; carrying() && shard < shape_.ranks; ++shard)  // the means that are here overwrite it
        means_->answered(shard).each_run(
            0, plan_.layout.granules(shard),
            [&](std::uint32_t first, std::uint32_t last) { contributions_->keep(shard, first, last); });
    means_->loss_scale_tag = loss_scale_tag_;
    means_->enter(now, bucket, contributing);
    owned_->enter(now, bucket.data() + plan_.layout.begin(own_shard()), contributing, gather_);
}

// What coding has taken from the bucket's last op joins the contribution, and the op leaves its own there. Where this rank
// is the owner, the reduction does that.
void Op::take_in(std::span<float> residue) {
    if (residue.empty()) return;
    residue_ = contributions_->residue = residue;
    const std::size_t begin = plan_.layout.begin(own_shard()), end = begin + plan_.layout.length(own_shard());
    owned_->values().residue = residue.subspan(begin, end - begin);
    const auto join = [&](std::size_t first, std::size_t last) {
        for (std::size_t k = first; k < last; ++k) bucket_[k] += std::exchange(residue[k], 0.0f);
    };
    if (context_.elided) return;
    join(0, begin);
    join(end, residue.size());
}

std::optional<wire::Reject> Op::scatter(Time now, const wire::Header& header,
                                        std::span<const std::byte> payload, Time source_entered_at) {
    if (!entered_) owned_->set_loss_scale_tag(header.loss_scale_tag);
    owned_->note_entry(header.source, source_entered_at);
    if (header.empty()) {
        const bool over = header.flags & wire::kOver;
        if (over ? owned_->has_ended(header.source) : owned_->abstained(header.source))
            return wire::Reject::kDuplicate;
        if (over)
            owned_->peer_ended(header.source, now);
        else
            owned_->abstain(header.source, now);
        return std::nullopt;
    }
    report_.traffic.trimmed_packets += payload.size() < wire::stated_payload_bytes(header);
    const std::uint32_t first = header.first / kGranule;
    const std::uint32_t last = first + wire::delivered_granules(header, payload.size());
    const auto reason = owned_->contribute(header, first, last, payload, now);
    if (!reason && context_.carry.keeps_log()) note_cut(header, payload.size(), false);
    return reason;
}

std::optional<wire::Reject> Op::gather(Time now, const wire::Header& header,
                                       std::span<const std::byte> payload) {
    const auto [first, last] = means_->granules_of(header);
    if (entered_ && carrying() && first < last)  // EMPTY overwrites it too, with zeros
        contributions_->keep(header.shard, first, last);
    const bool again = means_->answered(header.shard).any(first, last);
    const auto reason = means_->place(now, header, payload);
    if (reason) return reason;
    verdict_ |= (header.flags & wire::kVerdict) != 0;
    report_.traffic.trimmed_packets += payload.size() < wire::stated_payload_bytes(header);
    if (!header.empty() && context_.carry.keeps_log()) note_cut(header, payload.size(), again);
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
    verdict_ |= non_finite;
    owned_->reduce_more();
}

bool Op::gathered() const {
    if (!entered_ || ended_ || context_.roster.silent_count() == 0 || context_.roster.hears_nobody())
        return false;
    std::uint32_t silent = 0;  // granules
    for (Rank shard = 0; shard < shape_.ranks; ++shard) {
        if (shard == own_shard() || !context_.roster.silent(plan_.owner(shard))) continue;
        const std::uint32_t granules = plan_.layout.granules(shard);
        silent += granules - means_->answered(shard).count(0, granules);
    }
    return means_->answered_granules() + own_final() + silent == total_granules_ && !awaits_reliable();
}

void Op::give_up_silent(Time now) {
    if (!owned_) return;
    for (Rank rank = 0; rank < shape_.ranks; ++rank)
        if (context_.roster.silent(rank)) owned_->decide(rank, now);
}

// What is reliable is waited for beyond the bound.
Time Op::close_due_at(const Bounds& bounds) const {
    const Bounds& own = entered_ ? bounds_ : bounds;
    const ScatterClock& clock = owned_->clock();
    const Time majority = clock.majority_entered_at();
    return majority >= 0 && !reliable_.empty() ? clock.reliable_end_at(own).at : majority + own.scatter;
}

// When the own shard was reduced and the last parts of all means had come, except those of silent owners.
Time Op::gathered_at() const {
    const Time last_parts = owned_->reduced() ? means_->last_parts_at() : kNever;
    return last_parts == kNever ? kNever : std::max(last_parts, owned_->closed_at());
}

// Whether a reliable granule has not been answered that may still be.
bool Op::awaits_reliable() const {
    if (reliable_.empty()) return false;
    if (owned_->awaits_reliable()) return true;
    for (Rank shard = 0; shard < shape_.ranks; ++shard)
        if (shard != own_shard() && !context_.roster.silent(plan_.owner(shard)) &&
            !means_->answered(shard).contains(reliable_[shard]))
            return true;
    return false;
}

StageEnd Op::end_at() const {
    if (!entered_ || ended_) return {};
    return awaits_reliable() ? StageEnd{deadline_, Ending::kDeadline} : clock_end();
}

// Whether some of the means that have not come may still do.
bool Op::served() const {
    for (Rank shard = 0; shard < shape_.ranks; ++shard)
        if (shard != own_shard() && context_.roster.serves(plan_.owner(shard), plan_.seq) &&
            !means_->has_all(shard))
            return true;
    return false;
}

// When the majority has entered, from which on bounds run; -1: not known. A rank that hears nobody, not even answers, is cut
// off: it and the others do not wait for each other. One that owns nothing does not hear of the others' entries.
Time Op::majority_at() const {
    const Roster& roster = context_.roster;
    if (roster.heard_at() < entered_at_ || !plan_.layout.owned(own_shard())) return entered_at_;
    const Time majority = owned_->clock().majority_entered_at(), unanswered = roster.unanswered_since();
    return majority < 0 && unanswered != kNever ? unanswered : majority;
}

// When the op ends if nothing is reliable.
StageEnd Op::clock_end() const {
    StageEnd end{deadline_, Ending::kDeadline};
    const Time majority = majority_at();
    const Duration grace = std::max(bounds_.gather_grace, context_.roster.repeat_time());
    if (fetches_ && means_->lacking()) {
        // Nobody waits for this rank, and it waits while an owner has what is missing, however busy that is. What was
        // lost comes again too, unless nothing is sent again.
        if (served() && context_.roster.repeat_time() > 0) return end;
        if (!served()) end = {std::min(end.at, entered_at_ + bounds_.gather_grace), Ending::kBound};
    } else if (majority >= 0) {  // a late rank fetches what there is, in a round trip or two
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
    out.late = true;
    bool found = false;
    if (const auto late = late_steps_.find(peer); late != late_steps_.end()) {
        auto& steps = late->second;
        found = put_contribution(peer, steps.front().first, out);
        if (steps.front().first >= steps.front().last) steps.pop_front();
        if (steps.empty() && !unsent(peer)) out.header.flags |= wire::kLastPart;
        if (steps.empty()) late_steps_.erase(late);
    } else if (owned_) {
        found = next_mean(peer, owned_->late(peer), out);
    }
    if (found) complete_header(now, peer, out);
    return found;
}

// Puts the packet at this step, whether or not the owner has answered, and advances it.
bool Op::put_contribution(Rank peer, std::uint32_t& step, Outgoing& out) {
    const Rank shard = plan_.shard_of(peer);
    out.header.shard = shard;
    out.parcel.first = step;
    return contributions_->next(shard, GranuleSet(plan_.layout.granules(shard)), step, out);
}

Op::Again Op::again(Rank peer, const Parcel& parcel) const {
    const bool gather = parcel.stage == wire::Stage::kGather;
    if (gather && !context_.roster[peer].wants(plan_.seq)) return Again::kNever;
    // Planes that came trimmed are coarser, and are not waited for.
    const bool coarse = parcel.cut && context_.codec == wire::Codec::kPlanes;
    const bool over = gather ? coarse || owned_->has_ended(peer) : ended_ && !parcel.empty;
    if (!over) return Again::kNow;
    return context_.carries(plan_) ? Again::kLate : Again::kNever;
}

bool Op::repeat(Time now, Rank peer, const Parcel& parcel, Outgoing& out) {
    out = {};
    if (parcel.stage == wire::Stage::kGather) {
        put_mean(peer, {parcel.first, parcel.first + parcel.granules, parcel.empty}, out);
    } else if (parcel.empty) {
        put_end(peer, out);
    } else {
        const Rank shard = plan_.shard_of(peer);
        std::uint32_t step = parcel.first;
        out.header.shard = shard;
        if (!ended_ && !contributions_->next(shard, means_->answered(shard), step, out)) {
            if (carrying()) late_steps_[peer].push_back({parcel.first, parcel.first + 1});
            return false;
        }
        if (ended_ && !(contributions_ && put_contribution(peer, step, out))) return false;
    }
    if (parcel.last_part) out.header.flags |= wire::kLastPart;
    complete_header(now, peer, out);
    out.parcel = parcel;
    out.parcel.cut = false;
    out.again = true;
    return true;
}

void Op::complete_header(Time now, Destination to, Outgoing& out) const {
    out.to = to;
    if (to.is_everybody()) out.header.flags |= wire::kMulticast;
    out.header.seq = out.parcel.seq = plan_.seq;
    out.header.bucket_len = plan_.bucket.length;
    out.header.key = plan_.bucket.key;
    out.header.epoch = plan_.bucket.epoch;
    out.parcel.bucket = plan_.bucket;
    out.parcel.stage = out.header.stage();
    out.parcel.empty = out.header.empty();
    out.parcel.last_part = out.header.flags & wire::kLastPart;
    if (entered_)
        out.header.entry_us = static_cast<std::uint32_t>(
            std::min<Duration>((now - entered_at_) / kMicrosecond, wire::kNotEntered - 1));
    out.header.loss_scale_tag = loss_scale_tag_;
    if (out.header.stage() == wire::Stage::kGather && non_finite())
        out.header.flags |= wire::kNonFinite | wire::kVerdict;
}

bool Op::pending(Destination to) const { return (owned_ && owned_->pending(to)) || unsent(to); }

bool Op::next_mean(Destination to, const std::optional<Run>& run, Outgoing& out) {
    if (!run) return false;
    out.rewind = owned_->cursor(to);
    const std::uint32_t granules = put_mean(to, *run, out);
    owned_->advance(to, granules);
    out.parcel.first = run->first;
    out.parcel.granules = granules;
    if (owned_->sent_all(to)) out.header.flags |= wire::kLastPart;
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
    if (unsent(peer) && (ended_ || !contributes_to(peer))) {
        put_end(peer, out);
        sent = steps_[peer];
        end_due_[peer] = false;
        return true;
    }
    while (unsent(peer)) {
        const std::uint32_t step = sent;
        out.header.shard = shard;
        out.rewind = {0, step};
        out.parcel.first = step;
        if (contributions_->next(shard, means_->answered(shard), sent, out)) {
            if (!unsent(peer)) out.header.flags |= wire::kLastPart;
            return true;
        }
        if (carrying()) late_steps_[peer].push_back({step, sent});
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
    const Rank peer = out.to.is_everybody() ? shape_.self : out.to.rank();
    if (out.header.stage() == wire::Stage::kGather) {
        owned_->rewind(out.to, out.rewind);
    } else if (ended_ && out.header.empty()) {
        end_due_[peer] = true;
    } else if (out.late) {
        late_steps_[peer].push_front({out.parcel.first, out.parcel.first + 1});
    } else {
        sent_[peer] = out.rewind.granule;
        if (contributions_) contributions_->retract(out);
    }
}

OpReport Op::end(Time now, Status status, Ending ending, bool awaited, bool record_fates,
                 const StandIn* recorded) {
    const bool carried = context_.carries(plan_) && !is_error(status) && !is_void(status);
    owned_->leave_rest_empty();
    owned_->hand_back(awaited);
    report_.energies = contributions_->energies();
    end_contributions(carried);
    const StandIn stand_in = !carried ? StandIn() : recorded ? *recorded : this->stand_in();
    means_->end(stand_in);
    report_.stand_ins = stand_in.shares;
    ended_ = true;
    if (carried) end_carrying();
    if (non_finite() || !carried) std::fill(residue_.begin(), residue_.end(), 0.0f);  // nobody applies the op
    if (non_finite() && !bucket_.empty()) bucket_[0] = std::numeric_limits<float>::quiet_NaN();
    if (is_void(status)) {  // such as that of a rank whose parameters are old
        if (!context_.elided) std::fill(bucket_.begin(), bucket_.end(), 0.0f);
        means_->drop();
    }
    // Owners whose whole mean we have need no word from us; the others are told that we have ended the op.
    for (Rank peer = 0; peer < shape_.ranks; ++peer)
        end_due_[peer] = peer != shape_.self && !means_->has_all(plan_.shard_of(peer));
    fill_report(now, status, ending);
    LateLog late = context_.carry.take_log();
    report_.uses = std::move(late.uses);
    report_.cuts.insert(report_.cuts.end(), late.cuts.begin(), late.cuts.end());
    if (record_fates) this->record_fates(status);
    return std::move(report_);
}

// An owner that was not heard in this op may be dead, and would never take back what stood in for its mean.
StandIn Op::stand_in() const {
    StandIn stand_in{true, std::vector<float>(shape_.ranks)};
    const float share = contributing_ ? context_.carry.stand_in_share(plan_) : 0;
    for (Rank shard = 0; shard < shape_.ranks; ++shard)
        if (context_.roster[plan_.owner(shard)].heard_at >= entered_at_) stand_in.shares[shard] = share;
    return stand_in;
}

// What has not been sent is late from now on, if it is carried at all.
void Op::end_contributions(bool carried) {
    for (Rank peer = 0; peer < shape_.ranks; ++peer) {
        const std::uint32_t first = std::exchange(sent_[peer], steps_[peer]);
        if (!carried || peer == shape_.self || !contributes_to(peer)) continue;
        if (first < steps_[peer]) late_steps_[peer].push_back({first, steps_[peer]});
    }
    if (carried && contributing_) {
        if (contributions_->keep_rest()) return;
        context_.carry.note_eviction();
    }
    drop_late_contributions();
}

void Op::drop_late_contributions() {
    contributions_.reset();
    late_steps_.clear();
}

// Rule 9: what came late for earlier ops of the bucket is added to the result, unless nobody will apply that.
void Op::end_carrying() {
    context_.carry.learn(plan_, means_->correlation());
    if (non_finite())
        context_.carry.skip(plan_.seq, plan_.seq + 1);
    else
        report_.carried_coords = context_.carry.add_means(plan_, loss_scale_tag_, bucket_);
}

}  // namespace tailcut
