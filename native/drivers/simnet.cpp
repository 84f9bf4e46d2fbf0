#include "drivers/simnet.hpp"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "sim/neighbours.hpp"

namespace tailcut {
namespace {

enum Alarm : std::uint8_t { kTimer, kEnter, kThaw, kWake, kInject, kState };

constexpr std::uint64_t kEventsPerGlance = 1 << 16;

// The content of a packet, which its copies share.
struct Datagram {
    std::vector<std::byte> bytes;
    std::uint32_t copies = 0;
};

struct Host {
    std::unique_ptr<Core> core;
    Seq entered = 0, ended_ops = 0;  // ops of the program
    bool entering = false, leaving = false, closed = false;
    Time last_entry = 0, enter_at = 0, timer_at = kNever, linger_until = kNever;
    std::vector<sim::Packet> socket;  // packets that wait while the host is frozen
    std::uint64_t socket_bytes = 0;
    std::vector<std::optional<Time>> finished_at;          // by op
    std::size_t deeds_to_do = 0;                           // with blobs: planned, or fetches under way
    std::size_t told_skips = 0;                            // of spec.skips
    std::vector<Epoch> epochs;                             // to be installed
    std::map<std::uint32_t, std::vector<float>> residues;  // by key
};

class Sim {
public:
    Sim(const SimSpec& spec, const std::vector<std::vector<std::span<float>>>& buckets);
    SimResult run();

private:
    Time now() const { return network_.now(); }
    void take(const sim::Happening& happening);
    void on_alarm(const sim::Happening& alarm);
    void deliver(const sim::Packet& packet);
    void hand_over(const sim::Packet& packet);
    void enter(Rank rank);
    void plan_entry(Rank rank);
    void pump(Rank rank);
    void send(Rank source, const Outgoing& out);
    void take_report(Rank rank, OpReport report);
    void do_deed(const StateDeed& deed);
    void take_fetched(Rank rank);
    Terms fixed_terms(Rank rank) const {
        Terms terms = spec_.terms;
        if (!spec_.planes_by_rank.empty())
            terms.scatter.planes = terms.gather.planes = spec_.planes_by_rank[rank];
        return terms;
    }
    std::uint32_t new_datagram(std::span<const std::byte> head, std::span<const std::byte> tail);
    std::span<const std::byte> bytes_of(const sim::Packet& packet);
    void end(const sim::Packet& packet, SimFate fate);
    std::vector<Rank> members_of(Rank rank) const;

    const SimSpec& spec_;
    const std::vector<std::vector<std::span<float>>>& buckets_;
    sim::Network network_;
    sim::Neighbours neighbours_;
    sim::HostFreezes freezes_;
    const sim::HostHangs hangs_;
    std::vector<Host> hosts_;
    std::vector<float> elided_residue_;  // of all buckets: nobody reads it
    std::vector<Datagram> datagrams_;
    std::vector<std::uint32_t> free_datagrams_;
    std::vector<std::byte> damaged_, elided_;  // scratch
    std::size_t open_hosts_ = 0;
    std::uint64_t ended_ops_ = 0;
    SimResult result_;
};

Sim::Sim(const SimSpec& spec, const std::vector<std::vector<std::span<float>>>& buckets)
    : spec_(spec),
      buckets_(buckets),
      network_(spec, spec.ranks, wire::kHeaderBytes),
      neighbours_(spec, network_),
      freezes_(spec.freezes, spec.ranks),
      hangs_(spec.hangs, spec.ranks),
      hosts_(spec.ranks) {
    Settings settings;
    settings.shape = {0, spec.ranks, spec.seed};
    settings.group_tag = mix(spec.seed) & wire::kTagMask;
    settings.window_ops = spec.window_ops;
    settings.pool_bytes = spec.pool_bytes;
    settings.rows = spec.rows;
    settings.window_bytes =
        credit_window_bytes(spec.socket_buffer_bytes, senders_to_one(spec.ranks, spec.rows));
    settings.codec = spec.codec;
    settings.resend = spec.resend;
    settings.carry = spec.carry;
    settings.stand_in = spec.stand_in;
    settings.attendance = spec.attendance;
    settings.first_seq = spec.first_seq;
    settings.record_fates = spec.record;
    settings.elided = spec.elided;
    const std::vector<PeerSettings> peers(spec.ranks,
                                          {settings.window_bytes, spec.pool_bytes, spec.limits, spec.paced});
    for (Rank rank = 0; rank < spec.ranks; ++rank) {
        settings.shape.self = rank;
        settings.terms = fixed_terms(rank);
        settings.multicast = {members_of(rank), peers[rank]};
        hosts_[rank].core = make_core(settings, peers);
        hosts_[rank].finished_at.resize(spec.ops_by_rank[rank]);
    }
    result_.reports.resize(spec.ranks);
    result_.closed_at.assign(spec.ranks, kNever);
    open_hosts_ = spec.ranks;
    if (spec.elided && spec.residues)
        for (const auto& op : buckets)
            for (const auto& bucket : op)
                elided_residue_.resize(std::max(elided_residue_.size(), bucket.size()));
    for (std::uint32_t k = 0; k < spec.state_deeds.size(); ++k) {
        ++hosts_[spec.state_deeds[k].rank].deeds_to_do;
        network_.alarm(spec.state_deeds[k].at, spec.state_deeds[k].rank, kState, k);
    }
    for (Rank rank = 0; rank < spec.ranks; ++rank) plan_entry(rank);
    for (const Freeze& freeze : spec.freezes) {
        if (freeze.until != kNever) network_.alarm(freeze.until, freeze.rank, kThaw);
    }
    for (std::uint32_t k = 0; k < spec.injections.size(); ++k)
        network_.alarm(spec.injections[k].at, spec.injections[k].destination, kInject, k);
}

SimResult Sim::run() {
    sim::Happening happening;
    std::uint64_t glance_at = kEventsPerGlance;
    while (open_hosts_ > 0 && network_.next(happening)) {
        take(happening);
        if (spec_.glance && network_.events() >= glance_at) {
            spec_.glance(ended_ops_);
            glance_at = network_.events() + kEventsPerGlance;
        }
    }
    result_.ended_at = now();
    result_.events = network_.events();
    result_.network = network_.counters();
    for (const Host& host : hosts_) {
        result_.counters.push_back(host.core->counters());
        result_.served.push_back(host.core->take_served());
        result_.open.push_back(spec_.record ? host.core->take_open() : std::vector<OpReport>());
        if (StateChannel* const state = host.core->state()) result_.wanted.push_back(state->wanted());
    }
    return std::move(result_);
}

void Sim::take(const sim::Happening& happening) {
    if (neighbours_.take(happening)) return;
    if (happening.kind == sim::Happening::Kind::kAlarm)
        on_alarm(happening);
    else if (happening.kind == sim::Happening::Kind::kArrived)
        deliver(happening.packet);
    else
        end(happening.packet, happening.fate);
}

void Sim::on_alarm(const sim::Happening& alarm) {
    const Rank rank = alarm.host;
    Host& host = hosts_[rank];
    if (alarm.alarm == kInject) {
        const std::uint32_t tag = new_datagram(spec_.injections[alarm.number].datagram, {});
        datagrams_[tag].copies = 1;
        return deliver({rank, rank, static_cast<std::uint32_t>(datagrams_[tag].bytes.size()), tag, {}});
    }
    if (alarm.alarm == kTimer && now() != host.timer_at) return;  // an earlier alarm has replaced it
    if (alarm.alarm == kTimer) host.timer_at = kNever;
    if (freezes_.frozen(rank, now()) || host.closed) return;
    if (alarm.alarm == kThaw) {  // reads what waited in the socket before time goes on
        std::vector<sim::Packet> waiting;
        waiting.swap(host.socket);
        host.socket_bytes = 0;
        for (const sim::Packet& packet : waiting) hand_over(packet);
        host.timer_at = kNever;
    }
    if (host.entering && now() >= host.enter_at) enter(rank);
    if (alarm.alarm == kState) do_deed(spec_.state_deeds[alarm.number]);
    host.core->advance(now());
    pump(rank);
}

void Sim::deliver(const sim::Packet& packet) {
    const Rank rank = packet.destination;
    Host& host = hosts_[rank];
    if (host.closed) {
        network_.count(SimFate::kDeadHost);
        return end(packet, SimFate::kDeadHost);
    }
    if (!freezes_.frozen(rank, now())) {
        hand_over(packet);
        return pump(rank);
    }
    const std::uint64_t charged = bytes_of(packet).size() + kDatagramOverheadBytes;
    if (host.socket_bytes + charged > spec_.socket_buffer_bytes) {
        network_.count(SimFate::kSocketDrop);
        return end(packet, SimFate::kSocketDrop);
    }
    host.socket_bytes += charged;
    host.socket.push_back(packet);
}

void Sim::hand_over(const sim::Packet& packet) {
    network_.count(SimFate::kDelivered);
    hosts_[packet.destination].core->receive(now(), bytes_of(packet));
    end(packet, SimFate::kDelivered);
}

// ---- the program of a rank --------------------------------------------------------------------------------

void Sim::plan_entry(Rank rank) {
    Host& host = hosts_[rank];
    const Seq op = host.entered;
    if (host.entering || host.leaving) return;
    if (op >= spec_.ops_by_rank[rank]) {
        if (host.ended_ops < op || host.deeds_to_do > 0) return;
        host.leaving = true;
        host.linger_until = now() + spec_.linger;
        host.core->say_goodbye();
        network_.alarm(now(), rank, kWake);  // a rank without ops has no other occasion to say goodbye
        network_.alarm(host.linger_until, rank, kWake);
        return;
    }
    Time from = host.last_entry;
    if (op >= spec_.depth) {
        const auto& before = host.finished_at[op - spec_.depth];
        if (!before) return;
        from = std::max(from, *before);
    }
    host.entering = true;
    host.enter_at = std::max(now(), hangs_.done(rank, from, spec_.compute[op][rank]));
    network_.alarm(host.enter_at, rank, kEnter);
    if (hangs_.announced(rank, from, spec_.compute[op][rank])) {
        host.core->set_away(true);
        network_.alarm(now(), rank, kWake);
    }
}

void Sim::enter(Rank rank) {
    Host& host = hosts_[rank];
    if (!spec_.resync_before.empty() && spec_.resync_before[rank] == host.entered) host.core->resynced();
    for (std::size_t& told = host.told_skips; told < spec_.skips.size() && spec_.skips[told] < host.ended_ops;
         ++told) {
        const Seq seq = spec_.first_seq + spec_.skips[told];
        host.core->skipped(seq, seq + 1);
    }
    host.entering = false;
    host.last_entry = now();
    const Seq op = host.entered++;
    const std::span<float> bucket = buckets_[op][rank];
    const auto length = static_cast<std::uint32_t>(bucket.size());
    Terms terms = spec_.decide ? spec_.decide(rank, now(), length) : fixed_terms(rank);
    if (spec_.buckets > 0) terms.key = 1 + op % spec_.buckets;
    if (spec_.residues && terms.key != 0) {
        auto& residue = spec_.elided ? elided_residue_ : host.residues[terms.key];
        if (!spec_.elided) residue.resize(length);
        terms.residue = std::span(residue).first(length);
    }
    terms.reliable = spec_.reliable;
    if (!spec_.loss_scale_tags.empty()) terms.loss_scale_tag = spec_.loss_scale_tags[op];
    host.core->submit(now(), op, bucket, terms);
}

// Called after anything has happened to a rank: sends what it wants to send, takes its reports and sets its
// timer.
void Sim::pump(Rank rank) {
    Host& host = hosts_[rank];
    for (;;) {
        Outgoing out;
        while (host.core->transmit(now(), out)) send(rank, out);
        auto& reports = host.core->reports();
        for (OpReport& report : reports) take_report(rank, std::move(report));
        reports.clear();
        const std::vector<Epoch> epochs = std::exchange(host.epochs, {});
        for (const Epoch& epoch : epochs) host.core->install(now(), epoch);
        take_fetched(rank);
        plan_entry(rank);
        if (!epochs.empty()) continue;
        if (!host.leaving || !host.core->transmit(now(), out)) break;
        send(rank, out);
    }
    if (host.leaving && (host.core->drained() || now() >= host.linger_until)) {
        Outgoing out;
        host.core->leave();
        while (host.core->transmit(now(), out)) send(rank, out);
        host.closed = true;
        result_.closed_at[rank] = now();
        --open_hosts_;
        return;
    }
    const Time next = std::max(now(), host.core->next_timer());
    if (next < host.timer_at) {
        host.timer_at = next;
        network_.alarm(next, rank, kTimer);
    }
}

void Sim::take_report(Rank rank, OpReport report) {
    ++hosts_[rank].ended_ops;
    hosts_[rank].finished_at[report.ticket] = now();
    if (const auto at = hosts_[rank].residues.find(report.terms.key);
        at != hosts_[rank].residues.end() && report.status == Status::kBehind)
        std::fill(at->second.begin(), at->second.end(), 0.0f);  // nobody applies the op
    ++ended_ops_;
    if (spec_.observe) spec_.observe(rank, now(), report);
    if (spec_.agree)
        for (Epoch& epoch : spec_.agree(rank, now(), report)) hosts_[rank].epochs.push_back(std::move(epoch));
    if (spec_.summaries)
        result_.summaries.push_back(summary_of(rank, report));
    else
        result_.reports[rank].push_back(std::move(report));
}

void Sim::do_deed(const StateDeed& deed) {
    StateChannel& state = *hosts_[deed.rank].core->state();
    std::size_t& to_do = hosts_[deed.rank].deeds_to_do;
    switch (deed.kind) {
        case StateDeed::Kind::kOffer:
            state.offer(deed.id, deed.blob);
            --to_do;
            break;
        case StateDeed::Kind::kWithdraw:
            state.withdraw(deed.id);
            --to_do;
            break;
        case StateDeed::Kind::kFetch:
            state.fetch(deed.ticket, deed.server, deed.id, deed.most_bytes);
            break;
        case StateDeed::Kind::kCancel:  // and so the fetch is not waited for either
            state.cancel(deed.ticket);
            to_do -= 2;
    }
}

void Sim::take_fetched(Rank rank) {
    StateChannel* const state = hosts_[rank].core->state();
    if (!state) return;
    hosts_[rank].deeds_to_do -= state->fetched().size();
    for (Fetched& fetched : state->fetched()) result_.fetched.push_back({rank, now(), std::move(fetched)});
    state->fetched().clear();
}

// ---- packets ----------------------------------------------------------------------------------------------

void Sim::send(Rank source, const Outgoing& out) {
    const wire::HeaderBytes head = wire::pack(out.header);
    const bool elided = spec_.elided && out.header.type == wire::Type::kData;
    const std::uint32_t tag = new_datagram(head, elided ? std::span<const std::byte>{} : out.payload);
    const auto bytes = static_cast<std::uint32_t>(head.size() + out.payload.size());
    const Rank one = out.to.rank();
    const std::vector<Rank> members = out.to.is_everybody() ? members_of(source) : std::vector<Rank>{};
    const std::span<const Rank> to = out.to.is_everybody() ? members : std::span(&one, 1);
    datagrams_[tag].copies = network_.send(source, to, bytes, tag, true);
}

std::vector<Rank> Sim::members_of(Rank rank) const {
    std::vector<Rank> members;
    for (Rank other = 0; spec_.multicast && other < spec_.ranks; ++other)
        if (other != rank && std::find(spec_.deaf.begin(), spec_.deaf.end(), other) == spec_.deaf.end())
            members.push_back(other);
    return members;
}

std::uint32_t Sim::new_datagram(std::span<const std::byte> head, std::span<const std::byte> tail) {
    if (free_datagrams_.empty()) {
        free_datagrams_.push_back(static_cast<std::uint32_t>(datagrams_.size()));
        datagrams_.emplace_back();
    }
    const std::uint32_t tag = free_datagrams_.back();
    free_datagrams_.pop_back();
    std::vector<std::byte>& bytes = datagrams_[tag].bytes;
    bytes.resize(head.size() + tail.size());
    std::memcpy(bytes.data(), head.data(), head.size());
    if (!tail.empty()) std::memcpy(bytes.data() + head.size(), tail.data(), tail.size());
    return tag;
}

// The bytes as they arrive, possibly trimmed or damaged. They are valid until the next call.
std::span<const std::byte> Sim::bytes_of(const sim::Packet& packet) {
    std::span<const std::byte> whole = datagrams_[packet.tag].bytes;
    if (whole.size() < packet.bytes) {  // elided: nobody reads behind the header
        if (elided_.size() < packet.bytes) elided_.resize(packet.bytes);
        std::copy(whole.begin(), whole.end(), elided_.begin());
        whole = elided_;
    }
    whole = whole.first(packet.bytes);
    if (!packet.damage) return whole;
    if (packet.damage.cut_short) return whole.first(packet.damage.at);
    damaged_.assign(whole.begin(), whole.end());
    damaged_[packet.damage.at] ^= std::byte{0x90};
    return damaged_;
}

void Sim::end(const sim::Packet& packet, SimFate fate) {
    if (spec_.record) {
        const auto bytes = bytes_of(packet);
        const wire::Parsed parsed = wire::parse(bytes);
        const std::size_t payload = bytes.size() - std::min(bytes.size(), wire::kHeaderBytes);
        if (!parsed.ok || parsed.header.type == wire::Type::kData)
            result_.record.push_back({now(), fate, packet.source, packet.destination, parsed.header,
                                      static_cast<std::uint32_t>(payload), packet.damage || !parsed.ok});
    }
    if (--datagrams_[packet.tag].copies == 0) free_datagrams_.push_back(packet.tag);
}

}  // namespace

OpSummary summary_of(Rank rank, const OpReport& report) {
    OpSummary summary;
    summary.rank = rank;
    summary.op = report.ticket;
    summary.entered_at = report.entered_at;
    summary.closed_at = report.closed_at();
    summary.ended_at = report.ended_at;
    summary.scatter_coords = report.scatter.coords;
    summary.scatter_missing = report.scatter.missing;
    summary.gather_missing = report.gather.missing;
    summary.gather_empty = report.gather.empty;
    for (const OpReport& column : report.column) {
        summary.column_coords += column.scatter.coords;
        summary.column_missing += column.scatter.missing;
    }
    summary.sent_packets = report.traffic.sent_packets;
    summary.sent_bytes = report.traffic.sent_bytes;
    summary.received_packets = report.traffic.received_packets;
    summary.trimmed_packets = report.traffic.trimmed_packets;
    summary.late_coords = report.late_coords;
    return summary;
}

SimResult simulate(const SimSpec& spec, const std::vector<std::vector<std::span<float>>>& buckets) {
    return Sim(spec, buckets).run();
}

}  // namespace tailcut
