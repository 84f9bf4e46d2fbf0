#include "sim/transport.hpp"

#include <algorithm>

namespace tailcut::sim {
namespace {

// A transmission is lost once this many later ones were acknowledged.
constexpr std::uint64_t kReordering = 3;
constexpr Duration kProbeMargin = 2 * kMillisecond;    // Linux: the least time that its timers wait
constexpr Duration kMostRto = 120'000 * kMillisecond;  // Linux

}  // namespace

Transport::Transport(const TransportSpec& spec, Network& network, HostFreezes& freezes,
                     std::function<void(FlowId, std::uint64_t)> read)
    : spec_(spec), network_(network), freezes_(freezes), read_(std::move(read)) {}

Transport::FlowId Transport::open(Rank source, Rank destination) {
    Flow& flow = flows_.emplace_back(source, destination, Cubic(spec_.initial_window));
    flow.window_bytes = spec_.receive_buffer_bytes;
    const auto id = static_cast<FlowId>(flows_.size() - 1);
    renew(id);
    return id;
}

void Transport::renew(FlowId id) {
    Flow& flow = flows_[id];
    flow.cubic = Cubic(spec_.initial_window);
    flow.srtt = std::max<Duration>(1, network_.idle_round_trip(flow.source, flow.destination));
    flow.rttvar = flow.srtt / 2;
}

// ---- the sender -------------------------------------------------------------------------------------------

void Transport::send(FlowId id, std::uint64_t bytes, std::uint64_t label) {
    Flow& flow = flows_[id];
    flow.labels.push_back(label);
    do {  // a message without bytes is a segment without bytes
        const auto share = static_cast<std::uint32_t>(std::min<std::uint64_t>(bytes, spec_.segment_bytes));
        bytes -= share;
        flow.segments.push_back({share, State::kUnsent, bytes == 0, 0, 0});
    } while (bytes > 0);
    pump(id);
}

// Sends what was lost first, then what is new, as far as the congestion window and the receiver's window
// allow.
void Transport::pump(FlowId id) {
    Flow& flow = flows_[id];
    flow.limited = false;
    for (;;) {
        while (!flow.lost.empty() &&
               (flow.lost.front() < flow.base || segment(flow, flow.lost.front()).state != State::kLost))
            flow.lost.pop_front();
        const bool again = !flow.lost.empty();
        if (!again && flow.unsent == flow.base + flow.segments.size()) break;
        if (flow.in_flight > 0 && static_cast<double>(flow.in_flight) + 1 > flow.cubic.window()) {
            flow.limited = true;
            break;
        }
        const Index index = again ? flow.lost.front() : flow.unsent;
        if (again) {
            flow.lost.pop_front();
        } else {
            const std::uint32_t bytes = segment(flow, index).bytes;
            if (flow.outstanding_bytes + bytes > flow.window_bytes) break;
            flow.outstanding_bytes += bytes;
            ++flow.unsent;
        }
        transmit(id, index);
    }
    set_timer(id);
}

void Transport::transmit(FlowId id, Index index) {
    Flow& flow = flows_[id];
    Segment& sent = segment(flow, index);
    counters_.resent_segments += sent.state != State::kUnsent;
    ++counters_.segments;
    flow.in_flight += sent.state != State::kInFlight;
    sent.state = State::kInFlight;
    sent.number = flow.next_number++;
    sent.sent_at = network_.now();
    flow.transmissions.push_back({sent.number, index});
    post(flow.source, flow.destination, sent.bytes + spec_.header_bytes,
         {id, false, index, sent.number, sent.sent_at, {}, 0});
}

void Transport::on_ack(FlowId id, const Ack& ack) {
    Flow& flow = flows_[id];
    flow.window_bytes = ack.window_bytes;
    std::uint64_t fresh = mark_acked(flow, flow.base, ack.expected);
    for (std::size_t k = 0; k < ack.ranges; ++k)
        fresh += mark_acked(flow, std::max(flow.base, ack.beyond[k].first), ack.beyond[k].last);
    while (!flow.segments.empty() && flow.base < ack.expected) {
        flow.outstanding_bytes -= flow.segments.front().bytes;
        flow.segments.pop_front();
        ++flow.base;
    }
    if (fresh > 0) {
        const bool recovering = ack.number < flow.recovery_until;
        if (ack.sent_at != kNever) {
            flow.newest_acked = std::max(flow.newest_acked, ack.number);
            measure(flow, ack);
            if (flow.before_timeout) judge_timeout(flow, ack);
        }
        if (flow.limited && !recovering)
            flow.cubic.acked(static_cast<double>(fresh), network_.now(), flow.srtt);
        flow.backoff = 0;
        flow.probed = false;
        find_losses(flow);
        flow.timer_at = kNever;  // set anew after a sign of life
    }
    pump(id);
}

std::uint64_t Transport::mark_acked(Flow& flow, Index first, Index last) {
    std::uint64_t fresh = 0;
    for (Index index = first; index < last; ++index) {
        Segment& acked = segment(flow, index);
        if (acked.state == State::kAcked) continue;
        flow.in_flight -= acked.state == State::kInFlight;
        acked.state = State::kAcked;
        ++fresh;
    }
    return fresh;
}

void Transport::find_losses(Flow& flow) {
    while (!flow.transmissions.empty()) {
        const InFlight oldest = flow.transmissions.front();
        const bool current = oldest.segment >= flow.base &&
                             segment(flow, oldest.segment).state == State::kInFlight &&
                             segment(flow, oldest.segment).number == oldest.number;
        if (current && oldest.number + kReordering > flow.newest_acked) return;
        flow.transmissions.pop_front();
        if (!current) continue;
        segment(flow, oldest.segment).state = State::kLost;
        --flow.in_flight;
        flow.lost.push_back(oldest.segment);
        if (oldest.number >= flow.recovery_until) {  // once for everything that was in flight
            flow.recovery_until = flow.next_number;
            flow.cubic.lost();
        }
    }
}

// RFC 6298.
void Transport::measure(Flow& flow, const Ack& ack) {
    const Duration rtt = network_.now() - ack.sent_at;
    flow.rttvar += (std::abs(flow.srtt - rtt) - flow.rttvar) / 4;
    flow.srtt += (rtt - flow.srtt) / 8;
    const bool round_ended = ack.number >= flow.round_until;
    if (round_ended) flow.round_until = flow.next_number;
    flow.cubic.measured(rtt, round_ended);
}

Duration Transport::rto(const Flow& flow) const {
    const Duration first = flow.srtt + std::max(4 * flow.rttvar, spec_.least_rto);
    return std::min(kMostRto, first << std::min(flow.backoff, 20));
}

// There is one alarm at a time. If it comes too early because the timer was set anew, it is set again.
void Transport::set_timer(FlowId id) {
    Flow& flow = flows_[id];
    const bool waiting = flow.in_flight > 0 || flow.unsent < flow.base + flow.segments.size();
    if (!waiting) {
        flow.timer_at = kNever;
        return;
    }
    if (flow.timer_at == kNever) {
        const Duration timeout = rto(flow);
        flow.timer_at =
            network_.now() + (can_probe(flow) ? std::min(timeout, 2 * flow.srtt + kProbeMargin) : timeout);
    }
    if (flow.timer_at < flow.alarm_at) {
        flow.alarm_at = flow.timer_at;
        network_.alarm(flow.alarm_at, flow.source, kAlarm, id);
    }
}

void Transport::on_alarm(FlowId id) {
    Flow& flow = flows_[id];
    if (network_.now() != flow.alarm_at) return;  // an earlier alarm has replaced this one
    flow.alarm_at = kNever;
    if (flow.timer_at > network_.now()) {
        if (flow.timer_at != kNever) set_timer(id);
        return;
    }
    flow.timer_at = kNever;
    can_probe(flow) ? probe(id) : time_out(id);
}

// Sends the last transmission again: its acknowledgement tells what else is missing.
void Transport::probe(FlowId id) {
    Flow& flow = flows_[id];
    flow.probed = true;
    ++counters_.probes;
    Index last = flow.unsent - 1;
    while (segment(flow, last).state != State::kInFlight) --last;
    transmit(id, last);
    set_timer(id);
}

void Transport::time_out(FlowId id) {
    Flow& flow = flows_[id];
    ++counters_.timeouts;
    ++flow.backoff;
    // The receiver has no room, or its word that it has room again was lost: ask with a segment.
    if (flow.in_flight == 0) {
        flow.outstanding_bytes += segment(flow, flow.unsent).bytes;
        transmit(id, flow.unsent++);
        return set_timer(id);
    }
    if (!flow.before_timeout) {
        flow.before_timeout = flow.cubic;
        flow.timeout_number = flow.next_number;
    }
    flow.cubic.timed_out();
    flow.lost.clear();
    flow.transmissions.clear();
    for (Index index = flow.base; index < flow.unsent; ++index) {
        Segment& waiting = segment(flow, index);
        if (waiting.state == State::kAcked) continue;
        waiting.state = State::kLost;
        flow.lost.push_back(index);
    }
    flow.in_flight = 0;
    flow.recovery_until = flow.next_number;
    pump(id);
}

// On the first acknowledgement after a timeout: if it answers a transmission from before the timeout, nothing
// was lost.
void Transport::judge_timeout(Flow& flow, const Ack& ack) {
    const Cubic before = *flow.before_timeout;
    flow.before_timeout.reset();
    if (ack.number >= flow.timeout_number) return;
    flow.cubic = before;
    flow.lost.clear();
    flow.transmissions.clear();
    flow.recovery_until = 0;
    for (Index index = flow.base; index < flow.unsent; ++index) {
        Segment& waiting = segment(flow, index);
        if (waiting.state == State::kAcked) continue;
        flow.in_flight += waiting.state == State::kLost;
        waiting.state = State::kInFlight;
        flow.transmissions.push_back({waiting.number, index});
    }
    std::sort(flow.transmissions.begin(), flow.transmissions.end(),
              [](const InFlight& a, const InFlight& b) { return a.number < b.number; });
}

// ---- the receiver -----------------------------------------------------------------------------------------

void Transport::on_segment(FlowId id, const Unit& unit) {
    Flow& flow = flows_[id];
    const Index before = flow.expected;
    const bool fresh = note(flow, unit.segment);
    bool ended = false;
    for (Index index = before; index < flow.expected; ++index) {
        const Segment& read = segment(flow, index);
        flow.unread_bytes += read.bytes;
        flow.unread_messages += read.ends_message;
        ended |= read.ends_message;
    }
    const bool in_order = fresh && flow.expected == before + 1 && flow.beyond.empty();
    if (!freezes_.frozen(flow.destination, network_.now())) flow.unread_bytes = 0;
    if (!in_order || ended || ++flow.unacked >= 2) acknowledge(id, unit.number, unit.sent_at);
    if (flow.unread_bytes == 0) read_ready(id);
}

// Returns whether the segment is new. Advances `expected` over segments that had come before their turn.
bool Transport::note(Flow& flow, Index index) {
    if (index < flow.expected) return false;
    auto& beyond = flow.beyond;
    if (index == flow.expected && beyond.empty()) {
        ++flow.expected;
        return true;
    }
    const auto at = std::lower_bound(beyond.begin(), beyond.end(), index,
                                     [](const Range& range, Index value) { return range.last < value; });
    if (at != beyond.end() && at->first <= index && index < at->last) return false;
    auto grown = at;
    if (at != beyond.end() && at->last == index) {
        ++grown->last;
        const auto after = std::next(grown);
        if (after != beyond.end() && after->first == grown->last) {
            grown->last = after->last;
            grown = std::prev(beyond.erase(after));
        }
    } else if (at != beyond.end() && at->first == index + 1) {
        --grown->first;
    } else {
        grown = beyond.insert(at, {index, index + 1});
    }
    flow.newest = *grown;
    if (beyond.front().first == flow.expected) {
        flow.expected = beyond.front().last;
        beyond.erase(beyond.begin());
    }
    return true;
}

void Transport::read_ready(FlowId id) {
    Flow& flow = flows_[id];
    for (; flow.unread_messages > 0; --flow.unread_messages) {
        const std::uint64_t label = flow.labels.front();
        flow.labels.pop_front();
        read_(id, label);
    }
}

void Transport::thaw(Rank host) {
    for (FlowId id = 0; id < flows_.size(); ++id) {
        Flow& flow = flows_[id];
        if (flow.destination != host || flow.expected == 0) continue;
        flow.unread_bytes = 0;
        acknowledge(id, 0, kNever);  // announces that the window is open again
        read_ready(id);
    }
}

void Transport::acknowledge(FlowId id, Index number, Time sent_at) {
    Flow& flow = flows_[id];
    Unit unit{id, true, 0, 0, 0, {}, 0};
    Ack& ack = unit.ack;
    ack.expected = flow.expected;
    ack.number = number;
    ack.sent_at = sent_at;
    ack.window_bytes = spec_.receive_buffer_bytes - std::min(spec_.receive_buffer_bytes, flow.unread_bytes);
    const auto state = [&](const Range& range) { ack.beyond[ack.ranges++] = range; };
    if (flow.newest.first >= flow.expected && !flow.beyond.empty()) state(flow.newest);
    for (auto at = flow.beyond.rbegin(); at != flow.beyond.rend() && ack.ranges < ack.beyond.size(); ++at)
        if (at->first != flow.newest.first) state(*at);
    flow.unacked = 0;
    ++counters_.acks;
    const std::uint32_t options = ack.ranges > 0 ? 4 + 8u * ack.ranges : 0;
    post(flow.destination, flow.source, spec_.header_bytes + options, unit);
}

// ---- packets ----------------------------------------------------------------------------------------------

void Transport::post(Rank from, Rank to, std::uint32_t bytes, const Unit& unit) {
    if (free_units_.empty()) {
        free_units_.push_back(static_cast<std::uint32_t>(units_.size()));
        units_.emplace_back();
    }
    const std::uint32_t tag = free_units_.back();
    free_units_.pop_back();
    units_[tag] = unit;
    units_[tag].copies = network_.send(from, std::span(&to, 1), bytes, tag, false);
}

void Transport::arrived(const Packet& packet) {
    const Unit unit = units_[packet.tag];
    forget(packet.tag);
    if (packet.damage) return;  // the checksum detects it
    unit.is_ack ? on_ack(unit.flow, unit.ack) : on_segment(unit.flow, unit);
}

void Transport::forget(std::uint32_t tag) {
    if (--units_[tag].copies == 0) free_units_.push_back(tag);
}

}  // namespace tailcut::sim
