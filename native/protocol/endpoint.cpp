// What the local rank and the network hand to an endpoint. Ops live and end in lifecycle.cpp, sending is in
// transmit.cpp.
#include "protocol/endpoint.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace tailcut {
namespace {

// For what was lost once more: a FEEDBACK, the packet, a probe, its answer, the packet.
constexpr Duration kRepeatRoundTrips = 8;

// What is lost by multicast is sent again by unicast: it must fit there.
PeerSettings group_path_of(const MulticastSettings& multicast, const std::vector<PeerSettings>& peers) {
    PeerSettings path = multicast.path;
    for (const Rank member : multicast.members) path.limits.lower_to(peers[member].limits);
    return path;
}

std::vector<codec::PacketLimits> limits_of(const MulticastSettings& multicast,
                                           const std::vector<PeerSettings>& peers) {
    std::vector<codec::PacketLimits> limits;
    for (const PeerSettings& peer : peers) limits.push_back(peer.limits);
    if (!multicast.members.empty()) limits.push_back(group_path_of(multicast, peers).limits);
    return limits;
}

}  // namespace

Endpoint::Endpoint(const Settings& settings, const std::vector<PeerSettings>& peers)
    : settings_(settings),
      memory_(settings.pool_bytes, settings.elided),
      context_(settings.shape, settings.codec, limits_of(settings.multicast, peers), memory_,
               settings.elided),
      group_path_(group_path_of(settings.multicast, peers),
                  std::min(settings.multicast.members.size(), Audience::kMost),
                  static_cast<Rank>(settings.shape.ranks - 1)),
      shares_(settings.shape.ranks),
      recent_bytes_(2 * std::size_t{settings.window_ops}),
      terms_(settings.terms),
      next_seq_(settings.first_seq) {
    const auto rivals = static_cast<Rank>(settings.shape.ranks - 1);
    for (const PeerSettings& peer : peers) peers_.emplace_back(peer, rivals);
    for (Peer& peer : peers_) peer.entered = peer.told_entered = peer.served_below = settings.first_seq;
    context_.level = settings.level;
    context_.audience = Audience(settings.shape.ranks, settings.multicast.members);
}

// ---- the local rank ---------------------------------------------------------------------------------------

void Endpoint::submit(Time now, Ticket ticket, std::span<float> bucket, const Terms& terms,
                      std::span<const float> weights) {
    terms_ = terms;
    terms_len_ = static_cast<std::uint32_t>(bucket.size());
    OpReport refused;
    refused.ticket = ticket;
    refused.seq = next_seq_;
    if (closing_ || next_seq_ == std::numeric_limits<Seq>::max()) {  // rule 12: never wrap
        refused.status = closing_ ? Status::kClosed : Status::kSeqExhausted;
        reports_.push_back(std::move(refused));
        return;
    }
    if (const Seq behind = behind_ops(); behind > settings_.window_ops) {
        refused.status = Status::kBehind;
        refused.behind_ops = behind;
        refused.bucket_len = static_cast<std::uint32_t>(bucket.size());
        refused.entered_at = refused.ended_at = now;
        refused.contributed = false;
        if (!settings_.elided) std::fill(bucket.begin(), bucket.end(), 0.0f);
        jump(now);
        reports_.push_back(std::move(refused));
        return;
    }
    serve_together(now);
    const Seq seq = next_seq_++;
    context_.repeat_time = settings_.resend ? kRepeatRoundTrips * median_rtt() : 0;
    Slot& slot = slot_of(seq);
    Op* op = variant(seq, slot, static_cast<std::uint32_t>(bucket.size()), true);
    if (!op->owns()) own(now, slot, *op, memory_.take(op->own_floats()));
    ++in_flight_;
    op->enter(now, ticket, bucket, weights, terms, contributing_);
    for (Rank rank = 0; rank < peers_.size(); ++rank)
        if (peers_[rank].left(seq)) op->forsake(rank);
    cast_vote(now, slot, settings_.shape.self, op->layout().bucket_len);
    settle(now, slot, *op);
    mark_all_ready();
    retire();
}

void Endpoint::abort(Time now) {
    for (auto& [seq, slot] : slots_)
        for (auto& op : slot.variants)
            if (op->entered() && !op->finished()) finish(now, slot, *op, Status::kClosed, Ending::kDeadline);
}

void Endpoint::say_goodbye() {
    closing_ = true;
    goodbye_seq_ = next_seq_;
    for (Peer& peer : peers_) peer.goodbye_due = true;
    mark_all_ready();
}

void Endpoint::leave() {
    say_goodbye();
    for (const auto& [seq, slot] : slots_)
        for (const auto& op : slot.variants)
            if (!retired(seq, *op)) goodbye_seq_ = std::min(goodbye_seq_, seq);
}

bool Endpoint::drained() const {
    for (Rank rank = 0; rank < peers_.size(); ++rank)
        if (rank != settings_.shape.self && !peers_[rank].gone) return false;
    for (const auto& [seq, slot] : slots_)
        for (const auto& op : slot.variants)
            if (!retired(seq, *op)) return false;
    return ready_.empty();
}

// ---- from the network -------------------------------------------------------------------------------------

void Endpoint::receive(Time now, std::span<const std::byte> datagram) {
    ++counters_.traffic.received_packets;
    counters_.traffic.received_bytes += datagram.size();
    const wire::Parsed parsed = wire::parse(datagram);
    const wire::Header& header = parsed.header;
    if (!parsed.ok) return reject(parsed.reason);
    if (header.group_tag != settings_.group_tag) return reject(wire::Reject::kGroup);
    if (header.source >= peers_.size() || header.source == settings_.shape.self)
        return reject(wire::Reject::kSource);

    Peer& peer = peers_[header.source];
    const auto payload = datagram.subspan(wire::kHeaderBytes);
    if (header.epoch != 0 || header.incarnation != 0) return reject(wire::Reject::kEpoch);
    if (header.type != wire::Type::kData &&
        (payload.size() > sizeof(Arrivals::Report) || payload.size() % sizeof(std::uint64_t) != 0))
        return reject(wire::Reject::kShape);
    const bool multicast = header.multicast();
    if (multicast && header.type == wire::Type::kData)  // before its number counts for anything
        if (const auto reason = check_shape(header, payload.size())) return reject(*reason);
    Arrivals& arrivals = multicast ? peer.multicast_arrivals : peer.arrivals;
    bool& feedback_due = multicast ? peer.multicast_feedback_due : peer.feedback_due;
    arrivals.note(now, header);
    peer.heard_at = context_.heard_at = now;
    peer.quiet_ops = 0;
    if (context_.silent[header.source]) {
        context_.silent[header.source] = false;
        --context_.silent_count;
    }
    limiting_peers_ += (header.incast != 0) - (peer.incast != 0);
    peer.incast = header.incast;
    if (header.flags & wire::kReplyWanted) {
        feedback_due = true;
        mark_ready(header.source);
    }
    switch (header.type) {
        case wire::Type::kFeedback:
            return on_feedback(now, header, payload);
        case wire::Type::kGoodbye:
            return on_goodbye(now, header, payload);
        case wire::Type::kData:
            shares_.count(now, header.source, datagram.size());
            // As the source has charged it, whatever a switch has left of it.
            const auto cost =
                static_cast<std::uint32_t>(wire::kHeaderBytes + wire::stated_payload_bytes(header)) +
                kDatagramOverheadBytes;
            if (2 * arrivals.count(cost) >= settings_.window_bytes) {
                feedback_due = true;
                mark_ready(header.source);
            }
            return on_data(now, header, payload);
    }
}

// Of the other ranks: one behind a full queue does not lengthen everybody's grace.
Duration Endpoint::median_rtt() const {
    std::vector<Duration> rtts;
    for (Rank rank = 0; rank < peers_.size(); ++rank)
        if (rank != settings_.shape.self) rtts.push_back(peers_[rank].path.rtt());
    if (rtts.empty()) return 0;
    const auto middle = rtts.begin() + static_cast<std::ptrdiff_t>((rtts.size() - 1) / 2);
    std::nth_element(rtts.begin(), middle, rtts.end());
    return *middle;
}

// Of the paths that have anything in flight.
double Endpoint::mean_rate() const {
    double sum = 0;
    int paths = 0;
    for (const Peer& peer : peers_)
        if (peer.path.in_flight() && peer.path.rate().known()) sum += peer.path.rate().bytes_per_s(), ++paths;
    return paths > 0 ? sum / paths : 0;
}

// What is found lost is sent again while its op can use it.
void Endpoint::settle_path(Time now, const wire::Header& header, std::span<const std::byte> missing) {
    Peer& peer = peers_[header.source];
    const std::uint64_t lost_before = peer.path.lost_packets();
    peer.path.settle(now, header, missing, mean_rate());
    counters_.lost_packets += peer.path.lost_packets() - lost_before;
    take_lost(peer);
    mark_ready(header.source);
}

// Keep of what was lost what can still be used.
void Endpoint::take_lost(Peer& peer) {
    LostParcels& lost = peer.path.lost();
    lost.drop_if([&](const Parcel& parcel) {
        return !settings_.resend || peer.left(parcel.seq) || !slots_.contains(parcel.seq);
    });
    if (!lost.empty()) peer.served_below = std::min(peer.served_below, lost.oldest());
}

void Endpoint::on_feedback(Time now, const wire::Header& header, std::span<const std::byte> missing) {
    Peer& peer = peers_[header.source];
    if (header.multicast())
        settle_multicast(now, header, missing);
    else
        settle_path(now, header, missing);
    peer.goodbye_heard |= (header.flags & wire::kGoodbyeKnown) != 0;
    if (closing_ && !peer.gone && !peer.goodbye_heard) ask_later(now, peer);  // settle() has disarmed it
    const LrScale told{header.lr_scale, header.lr_period};
    if (told.near(header.seq) && told.newer_than(lr_scale_)) lr_scale_ = told;
    note_entered(now, header.source, header.seq);
}

void Endpoint::on_goodbye(Time now, const wire::Header& header, std::span<const std::byte> missing) {
    Peer& peer = peers_[header.source];
    settle_path(now, header, missing);
    if (peer.left(header.seq)) return;
    note_entered(now, header.source, header.seq);
    peer.gone = true;
    peer.gone_seq = header.seq;
    if (const int member = context_.audience.index(header.source); member >= 0)
        context_.audience.present.reset(static_cast<std::size_t>(member));
    for (auto at = slots_.lower_bound(header.seq); at != slots_.end(); ++at)
        for (auto& op : at->second.variants) {
            op->abstain(header.source, now);
            op->uncover(header.source);
            if (op->entered() && !op->finished()) op->forsake(header.source);
            settle(now, at->second, *op);
        }
    mark_all_ready();
}

void Endpoint::on_data(Time now, const wire::Header& header, std::span<const std::byte> payload) {
    if (header.seq == std::numeric_limits<Seq>::max()) return reject(wire::Reject::kSeq);
    if (const auto reason = check_shape(header, payload.size())) return reject(*reason);
    counters_.traffic.trimmed_packets += payload.size() < wire::stated_payload_bytes(header);
    const bool source_entered = header.entry_us != wire::kNotEntered;
    if (source_entered) note_entered(now, header.source, header.seq + 1);  // may jump

    const auto found = slots_.find(header.seq);
    const auto forgotten = [&](const Slot& slot) {
        return std::find(slot.forgotten.begin(), slot.forgotten.end(), header.bucket_len) !=
               slot.forgotten.end();
    };
    // Over for us, and forgotten. Never begun anew: the mean would be another than the one already sent.
    if (header.seq < next_seq_ && (found == slots_.end() || forgotten(found->second))) {
        note_late(now, header, payload.size());
        if (header.stage() == wire::Stage::kGather) return;
        peers_[header.source].feedback_due = true;  // tells the source how far the group is
        mark_ready(header.source);
        return reject(wire::Reject::kLate);
    }
    if (header.seq >= next_seq_ && header.seq - next_seq_ >= settings_.window_ops)
        return reject(wire::Reject::kSeq);

    Slot& slot = found != slots_.end() ? found->second : slot_of(header.seq);
    Op* op = variant(header.seq, slot, header.bucket_len, false);
    if (!op) return reject(wire::Reject::kLength);
    if (source_entered) cast_vote(now, slot, header.source, header.bucket_len);
    const std::uint32_t final_before = op->own_final();
    if (const auto reason = deliver(now, slot, *op, header, payload)) {
        // The source sends it again when we have room, by unicast.
        if (reason == wire::Reject::kPool && header.multicast())
            peers_[header.source].multicast_arrivals.refuse(header.number);
        return reject(*reason);
    }
    op->count_received(wire::kHeaderBytes + payload.size());
    if (op->own_final() != final_before) mark_all_ready();
    settle(now, slot, *op);
}

std::optional<wire::Reject> Endpoint::deliver(Time now, Slot& slot, Op& op, const wire::Header& header,
                                              std::span<const std::byte> payload) {
    if (header.stage() == wire::Stage::kScatter) {
        if (!op.owns()) {
            Block block = room(op.own_floats(), wire::Stage::kScatter, op, now);
            if (!block) return wire::Reject::kPool;
            own(now, slot, op, std::move(block));
        }
        const Duration age = std::min(Duration{header.entry_us} * kMicrosecond, terms_.bounds.deadline);
        const auto reason = op.scatter(now, header, payload, now - age);
        if (reason == wire::Reject::kLate) {
            note_late(now, header, payload.size());
            op.count_late();
        }
        return reason;
    }
    if (op.finished()) {  // rule 9: late is not lost, but it does not touch a bucket that was handed back
        note_late(now, header, payload.size());
        return std::nullopt;
    }
    if (!op.holds()) {
        // Who multicasts may not have reckoned with our room: no contribution is given up for that.
        const auto stage = header.multicast() ? wire::Stage::kScatter : wire::Stage::kGather;
        Block block = room(op.layout().bucket_len, stage, op, now);
        if (!block) return wire::Reject::kPool;
        op.hold(std::move(block));
    }
    return op.gather(now, header, payload);
}

// docs/wire-format.md W7 and W8.
std::optional<wire::Reject> Endpoint::check_shape(const wire::Header& header,
                                                  std::size_t payload_bytes) const {
    const Shape& shape = settings_.shape;
    const bool gather = header.stage() == wire::Stage::kGather;
    if (!header.empty() && header.codec != settings_.codec) return wire::Reject::kType;
    if (settings_.level == Level::kColumn && !(header.scale >= 0 && std::isfinite(header.scale)))
        return wire::Reject::kShape;
    if (header.shard >= shape.ranks) return wire::Reject::kShape;
    if (shape.owner(header.shard, header.seq) != (gather ? header.source : shape.self))
        return wire::Reject::kOwner;
    if (!gather && header.entry_us == wire::kNotEntered) return wire::Reject::kShape;
    if (payload_bytes > wire::stated_payload_bytes(header)) return wire::Reject::kShape;
    if ((header.flags & wire::kOver) && (gather || header.count != 0)) return wire::Reject::kShape;
    if (header.count == 0)
        return header.empty() && header.first == 0 ? std::nullopt : std::optional(wire::Reject::kShape);
    if (header.empty() && !gather) return wire::Reject::kShape;

    const std::uint32_t length = Layout{header.bucket_len, shape.ranks}.length(header.shard);
    return codec::run_fits(header, length) ? std::nullopt : std::optional(wire::Reject::kShape);
}

}  // namespace tailcut
