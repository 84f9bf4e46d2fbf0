#include "protocol/endpoint.hpp"

#include <algorithm>
#include <limits>
#include <utility>

#include "protocol/packet_checks.hpp"

namespace tailcut {
namespace {

// Enough for a packet that is lost twice: a FEEDBACK, the packet, a probe, its answer, the packet.
constexpr Duration kRepeatRoundTrips = 8;

}  // namespace

Endpoint::Endpoint(const Settings& settings, const std::vector<PeerSettings>& peers,
                   std::unique_ptr<Values> values, CloseListener* listener)
    : settings_(settings),
      memory_(settings.pool_bytes, settings.elided),
      roster_(settings.shape, settings.first_seq),
      attendance_(roster_, settings.attendance, settings.window_ops),
      links_(settings_, peers),
      accounts_(settings.shape.ranks, links_),
      pools_(settings_, epochs_, roster_, links_),
      values_(std::move(values)),
      carry_(settings.carry, settings.stand_in, settings.late_ops(), settings.record_fates,
             accounts_.counters),
      context_(settings.shape, settings.codec, Links::limits(settings, peers), settings.elided, epochs_,
               roster_, attendance_, links_.audience, memory_, *values_, carry_, scratch_),
      ops_(settings_, context_, roster_, attendance_, links_, pools_, accounts_, listener),
      state_(settings, links_),
      outbox_(settings_, roster_, ops_, links_, pools_, accounts_, state_) {}

// ---- the local rank ---------------------------------------------------------------------------------------

void Endpoint::submit(Time now, Ticket ticket, std::span<float> bucket, const Terms& terms) {
    if (ops_.stopped()) return refuse(now, ticket, bucket, terms, Status::kClosed);
    if (ops_.next_seq() == std::numeric_limits<Seq>::max())  // rule 12: never wrap
        return refuse(now, ticket, bucket, terms, Status::kSeqExhausted);
    if (terms.seq.value_or(ops_.next_seq()) != ops_.next_seq())  // the caller has not heard of the jump yet
        return refuse(now, ticket, bucket, terms, Status::kBehind);
    if (roster_.behind_ops(ops_.next_seq()) > settings_.window_ops) {
        refuse(now, ticket, bucket, terms, Status::kBehind);
        ops_.jump(now);
        return spread_news();
    }
    roster_.note_away(roster_.self(), false);
    roster_.set_repeat_time(settings_.resend ? kRepeatRoundTrips * links_.median_rtt(roster_.self()) : 0);
    for (Rank rank = 0; rank < roster_.ranks(); ++rank)
        if (rank != roster_.self())
            roster_.note_lost(rank, !pools_.can_serve(rank, ops_.next_seq(), ops_.first_timed()));
    outbox_.begin_op(now);
    ops_.enter(now, ticket, bucket, terms);
    ops_.retire();
    spread_news();
}

void Endpoint::refuse(Time now, Ticket ticket, std::span<float> bucket, const Terms& terms, Status status) {
    OpReport report;
    report.ticket = ticket;
    report.seq = ops_.next_seq();
    report.status = status;
    report.bucket_len = static_cast<std::uint32_t>(bucket.size());
    report.entered_at = report.ended_at = now;
    report.contributed = false;
    report.terms = terms;
    if (status == Status::kBehind) {
        report.behind_ops = roster_.behind_ops(ops_.next_seq());
        if (!settings_.elided) std::fill(bucket.begin(), bucket.end(), 0.0f);
    }
    ops_.reports().push_back(std::move(report));
}

void Endpoint::abort(Time now) {
    ops_.abort(now);
    spread_news();
}

void Endpoint::say_goodbye() {
    ops_.stop();
    outbox_.say_goodbye(ops_.next_seq());
}

void Endpoint::leave() {
    ops_.stop();
    outbox_.say_goodbye(ops_.oldest_needed());
}

bool Endpoint::drained() const {
    for (Rank rank = 0; rank < roster_.ranks(); ++rank)
        if (rank != roster_.self() && !roster_[rank].leaving) return false;
    return ops_.all_retired() && outbox_.empty();
}

void Endpoint::install(Time now, Epoch epoch) {
    const Seq first_seq = epoch.first_seq;
    if (!epochs_.add(std::move(epoch))) return;
    ops_.cut_anew(now, first_seq);
    for (Rank rank = 0; rank < roster_.ranks(); ++rank)
        if (rank != roster_.self()) outbox_.answer(rank);  // tells them that there is a later epoch
    spread_news();
}

void Endpoint::set_away(bool away) {
    if (!roster_.note_away(roster_.self(), away)) return;
    for (Rank rank = 0; rank < roster_.ranks(); ++rank)
        if (rank != roster_.self()) outbox_.answer(rank);
}

void Endpoint::skip_to(Seq seq) {
    ops_.skip_to(seq);
    spread_news();
}

void Endpoint::close(Time now, Seq seq) {
    ops_.close(now, seq);
    spread_news();
}

void Endpoint::reduce(Time now, Seq seq, std::uint32_t bucket_len, bool non_finite,
                      const std::function<void(Reduction&)>& put) {
    ops_.reduce(now, seq, bucket_len, non_finite, put);
    spread_news();
}

// ---- from the network -------------------------------------------------------------------------------------

void Endpoint::receive(Time now, std::span<const std::byte> datagram) {
    Traffic& traffic = accounts_.counters.traffic;
    ++traffic.received_packets;
    traffic.received_bytes += datagram.size();
    const wire::Parsed parsed = wire::parse(datagram);
    const wire::Header& header = parsed.header;
    if (!parsed.ok) return accounts_.reject(parsed.reason);
    const auto payload = datagram.subspan(wire::kHeaderBytes);
    if (const auto reason = check_sender(settings_, header, payload.size())) return accounts_.reject(*reason);
    // What has waited long in front of the own port says nothing of now.
    const Time sent = now - links_[header.source].arrivals.queued(now, header);
    roster_.hear(now, sent, header.source, header.incast);
    epochs_.hear(header.epoch);
    if (header.type == wire::Type::kData) {  // checked before its number counts
        const Epoch& epoch = epochs_.at(header.seq);
        if (header.epoch != epoch.number) return refuse_epoch(header, epoch);
        if (header.multicast())
            if (const auto reason = check_data(settings_, epoch, header, payload.size()))
                return accounts_.reject(*reason);
    }
    outbox_.hear(now, header, datagram.size());
    switch (header.type) {
        case wire::Type::kFeedback:
            on_feedback(now, header, payload);
            break;
        case wire::Type::kGoodbye:
            on_goodbye(now, header, payload);
            break;
        case wire::Type::kState:
            if (const auto reason = state_.receive(now, header, payload)) accounts_.reject(*reason);
            break;
        case wire::Type::kData:
            on_data(now, header, payload);
    }
    spread_news();
}

// The packet counts as lost, and is sent again: the source or this rank will have heard of the later epoch by then.
void Endpoint::refuse_epoch(const wire::Header& header, const Epoch& ours) {
    accounts_.reject(wire::Reject::kEpoch);
    if (header.epoch < ours.number) outbox_.answer(header.source);
}

std::optional<Rank> Endpoint::claimed_source(std::span<const std::byte> datagram) const {
    if (datagram.size() < wire::kHeaderBytes || wire::tag_of(datagram) != settings_.group_tag) return {};
    const Rank source = wire::source_of(datagram);
    return source < roster_.ranks() ? std::optional(source) : std::nullopt;
}

void Endpoint::on_feedback(Time now, const wire::Header& header, std::span<const std::byte> report) {
    if (header.flags & wire::kSkipped) roster_.note_wanted_from(header.source, header.seq);
    settle(now, header, report);
    roster_.hear(LrScale{header.lr_scale, header.lr_period}, header.seq);
    if (!(header.flags & wire::kForgotten)) accounts_.hear_lacked(header);
    note_entered(now, header.source, header.seq);
    // One that was overtaken by an entry says nothing.
    if (header.seq >= roster_[header.source].entered)
        roster_.note_away(header.source, header.flags & wire::kAway);
}

// A report that was trimmed on its way says nothing; another one is asked for in time.
void Endpoint::settle(Time now, const wire::Header& header, std::span<const std::byte> report) {
    if (report.size() == wire::stated_payload_bytes(header)) outbox_.settle(now, header, report);
    if (header.flags & wire::kForgotten) roster_.note_served_from(header.source, header.served_from);
}

void Endpoint::on_goodbye(Time now, const wire::Header& header, std::span<const std::byte> report) {
    settle(now, header, report);
    if (roster_[header.source].left(header.seq)) return;
    note_entered(now, header.source, header.seq);
    roster_.note_leaving(header.source, header.seq);
    outbox_.note_leaving(header.source);
    ops_.peer_left(now, header.source, header.seq);
}

void Endpoint::on_data(Time now, const wire::Header& header, std::span<const std::byte> payload) {
    if (header.seq == std::numeric_limits<Seq>::max()) return accounts_.reject(wire::Reject::kSeq);
    if (const auto reason = check_data(settings_, epochs_.at(header.seq), header, payload.size()))
        return accounts_.reject(*reason);
    accounts_.counters.traffic.trimmed_packets += payload.size() < wire::stated_payload_bytes(header);
    if (header.entry_us != wire::kNotEntered)
        note_entered(now, header.source, header.seq + 1);  // ops_ may jump

    // An op that is over is never begun anew: its mean would differ from the one already sent.
    if (ops_.over(header)) {
        const auto reason = ops_.note_late(now, header, payload);
        if (header.stage() == wire::Stage::kScatter)
            outbox_.answer(header.source);  // tells the source how far the group is
        if (reason) accounts_.reject(*reason);
        return;
    }
    if (header.seq >= ops_.next_seq() && header.seq - ops_.next_seq() >= settings_.window_ops)
        return accounts_.reject(wire::Reject::kSeq);
    // If trimming has left out some of a packet that is taken in once, that is when it comes again.
    const bool refined = header.stage() == wire::Stage::kGather &&
                         (header.codec == wire::Codec::kRaw || (settings_.carry && header.key != 0));
    if (settings_.resend && !refined && wire::lacks_granules(header, payload.size())) payload = {};
    if (const auto reason = ops_.deliver(now, header, payload)) {
        if (reason == wire::Reject::kPool) outbox_.refuse(header);
        accounts_.reject(*reason);
    }
}

// ---- for the ledger ---------------------------------------------------------------------------------------

std::vector<OpReport> Endpoint::take_open() {
    std::vector<OpReport> open = ops_.take_open();
    if (open.empty()) return open;
    LateLog late = carry_.take_news();  // nobody has heard of it before this op is sent
    open.front().uses = std::move(late.uses);
    open.front().cuts.insert(open.front().cuts.end(), late.cuts.begin(), late.cuts.end());
    return open;
}

// ---- progress and time ------------------------------------------------------------------------------------

void Endpoint::note_entered(Time now, Rank rank, Seq entered) {
    if (!roster_.note_entered(rank, entered)) return;
    outbox_.note_entered(rank);
    if (ops_.in_flight() == 0) return;  // the next submit() will notice
    if (roster_.behind_ops(ops_.next_seq()) > settings_.window_ops) ops_.jump(now);
}

void Endpoint::spread_news() {
    if (ops_.take_news()) outbox_.note_news();
    if (!ops_.take_forgot()) return;
    for (Rank rank = 0; rank < roster_.ranks(); ++rank)  // it may wait for that mean
        if (rank != roster_.self() && roster_.present(rank) && ops_.lags(rank)) outbox_.answer(rank);
}

Time Endpoint::next_timer() const {
    return std::min({ops_.next_timer(), outbox_.next_timer(), state_.next_timer()});
}

void Endpoint::advance(Time now) {
    ops_.advance(now);
    state_.advance(now);
    outbox_.advance(now);
    spread_news();
}

}  // namespace tailcut
