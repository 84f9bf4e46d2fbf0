#include "drivers/simnet.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace tailcut {
namespace {

enum class Kind : std::uint8_t { kArrive, kDeliver, kTimer, kEnter, kThaw, kWake, kInject };

struct Event {
    Time at;
    std::uint64_t order;  // ties in the order of scheduling: one seed, one history
    Kind kind;
    Rank rank;
    std::uint32_t packet;
};
struct Later {
    bool operator()(const Event& a, const Event& b) const {
        return a.at != b.at ? a.at > b.at : a.order > b.order;
    }
};

struct Packet {
    Rank source, destination;
    std::vector<std::byte> bytes;
    bool damaged;
};

struct Host {
    std::unique_ptr<Endpoint> endpoint;
    Seq entered = 0, finished = 0;  // ops of the program
    bool entering = false, leaving = false, closed = false;
    Time last_entry = 0, enter_at = 0, timer_at = kNever, linger_until = kNever;
    Time nic_free = 0, port_free = 0;
    std::vector<std::uint32_t> socket;  // packets that wait while the host is frozen
    std::uint64_t socket_bytes = 0;
    std::vector<Time> finished_at;
};

class Sim {
public:
    Sim(const SimSpec& spec, const std::vector<std::vector<std::span<float>>>& buckets);
    SimResult run();

private:
    void schedule(Time at, Kind kind, Rank rank, std::uint32_t packet = 0) {
        events_.push({at, order_++, kind, rank, packet});
    }
    void handle(const Event& event);
    void arrive(std::uint32_t packet);
    void deliver(std::uint32_t packet);
    void hand_over(std::uint32_t packet);
    void enter(Rank rank);
    void plan_entry(Rank rank);
    void pump(Rank rank);
    void send(Rank source, const Outgoing& out);
    bool frozen(Rank rank) const;
    bool cut(Rank a, Rank b) const;
    Terms terms_of(Rank rank) const {
        Terms terms = spec_.terms;
        if (!spec_.planes_by_rank.empty()) terms.planes = spec_.planes_by_rank[rank];
        return terms;
    }
    double chance() { return static_cast<double>(mix(spec_.seed ^ mix(draws_++)) >> 11) * 0x1p-53; }
    std::uint32_t new_packet(Rank source, Rank destination, std::span<const std::byte> head,
                             std::span<const std::byte> tail);
    void end(std::uint32_t packet, SimFate fate);
    void note(std::uint32_t packet, SimFate fate);
    void damage(Packet& packet);
    Duration wire_time(std::size_t bytes) const {
        return spec_.bytes_per_s > 0
                   ? static_cast<Duration>(std::llround(static_cast<double>(bytes) / spec_.bytes_per_s * 1e9))
                   : 0;
    }

    const SimSpec& spec_;
    const std::vector<std::vector<std::span<float>>>& buckets_;
    std::vector<Host> hosts_;
    std::priority_queue<Event, std::vector<Event>, Later> events_;
    std::vector<Packet> packets_;
    std::vector<std::uint32_t> free_packets_;
    std::size_t open_hosts_ = 0;
    std::uint64_t order_ = 0, draws_ = 0;
    Time now_ = 0;
    SimResult result_;
};

Sim::Sim(const SimSpec& spec, const std::vector<std::vector<std::span<float>>>& buckets)
    : spec_(spec), buckets_(buckets), hosts_(spec.ranks) {
    Settings settings;
    settings.shape = {0, spec.ranks, spec.seed};
    settings.group_tag = mix(spec.seed) & wire::kTagMask;
    settings.window_ops = spec.window_ops;
    settings.pool_bytes = spec.pool_bytes;
    settings.window_bytes = credit_window_bytes(spec.socket_buffer_bytes, spec.ranks);
    settings.codec = spec.codec;
    settings.resend = spec.resend;
    settings.first_seq = spec.first_seq;
    settings.record_fates = spec.record;
    const std::vector<PeerSettings> peers(spec.ranks,
                                          {settings.window_bytes, spec.pool_bytes, spec.limits, spec.paced});
    for (Rank rank = 0; rank < spec.ranks; ++rank) {
        settings.shape.self = rank;
        settings.terms = terms_of(rank);
        hosts_[rank].endpoint = std::make_unique<Endpoint>(settings, peers);
    }
    result_.reports.resize(spec.ranks);
    result_.closed_at.assign(spec.ranks, kNever);
    open_hosts_ = spec.ranks;
    for (Rank rank = 0; rank < spec.ranks; ++rank) plan_entry(rank);
    for (const Freeze& freeze : spec.freezes) {
        if (freeze.until != kNever) schedule(freeze.until, Kind::kThaw, freeze.rank);
    }
    for (std::uint32_t k = 0; k < spec.injections.size(); ++k)
        schedule(spec.injections[k].at, Kind::kInject, spec.injections[k].destination, k);
}

SimResult Sim::run() {
    while (!events_.empty() && open_hosts_ > 0) {
        const Event event = events_.top();
        events_.pop();
        now_ = event.at;
        ++result_.events;
        handle(event);
    }
    result_.ended_at = now_;
    for (const Host& host : hosts_) result_.counters.push_back(host.endpoint->counters());
    return std::move(result_);
}

void Sim::handle(const Event& event) {
    switch (event.kind) {
        case Kind::kArrive:
            return arrive(event.packet);
        case Kind::kDeliver:
            return deliver(event.packet);
        case Kind::kInject:
            return deliver(new_packet(event.rank, event.rank, spec_.injections[event.packet].datagram, {}));
        default:
            break;
    }
    Host& host = hosts_[event.rank];
    if (event.kind == Kind::kTimer && event.at != host.timer_at) return;  // overtaken by an earlier one
    if (event.kind == Kind::kTimer) host.timer_at = kNever;
    if (frozen(event.rank) || host.closed) return;
    if (event.kind == Kind::kThaw) {  // first what waited in the socket, then the clock
        std::vector<std::uint32_t> waiting;
        waiting.swap(host.socket);
        host.socket_bytes = 0;
        for (const std::uint32_t packet : waiting) hand_over(packet);
        host.timer_at = kNever;
    }
    if (host.entering && now_ >= host.enter_at) enter(event.rank);
    host.endpoint->advance(now_);
    pump(event.rank);
}

// A packet reaches the switch port of its destination.
void Sim::arrive(std::uint32_t id) {
    Packet& packet = packets_[id];
    if (cut(packet.source, packet.destination)) return end(id, SimFate::kPartitioned);
    if (chance() < spec_.loss) return end(id, SimFate::kLost);
    Host& host = hosts_[packet.destination];
    const Time start = std::max(now_, host.port_free);
    if (spec_.bytes_per_s > 0 && spec_.queue_bytes > 0) {
        const double backlog = static_cast<double>(start - now_) * 1e-9 * spec_.bytes_per_s;
        if (backlog + static_cast<double>(packet.bytes.size()) > static_cast<double>(spec_.queue_bytes))
            return end(id, SimFate::kQueueDrop);
    }
    host.port_free = start + wire_time(packet.bytes.size());
    if (spec_.corrupt > 0 && chance() < spec_.corrupt) damage(packet);
    if (spec_.trim > 0 && chance() < spec_.trim && packet.bytes.size() > wire::kHeaderBytes) {
        const std::size_t payload = packet.bytes.size() - wire::kHeaderBytes;
        const auto kept = spec_.trim_to_payload_bytes > 0
                              ? std::min<std::size_t>(payload, spec_.trim_to_payload_bytes)
                              : static_cast<std::size_t>(chance() * static_cast<double>(payload));
        packet.bytes.resize(wire::kHeaderBytes + kept);
    }
    if (host.port_free == now_) return deliver(id);
    schedule(host.port_free, Kind::kDeliver, packet.destination, id);
}

void Sim::deliver(std::uint32_t id) {
    const Packet& packet = packets_[id];
    const Rank rank = packet.destination;
    Host& host = hosts_[rank];
    if (host.closed) return end(id, SimFate::kDeadHost);
    if (!frozen(rank)) {
        hand_over(id);
        return pump(rank);
    }
    const std::uint64_t charged = packet.bytes.size() + kDatagramOverheadBytes;
    if (host.socket_bytes + charged > spec_.socket_buffer_bytes) return end(id, SimFate::kSocketDrop);
    host.socket_bytes += charged;
    host.socket.push_back(id);
}

void Sim::hand_over(std::uint32_t id) {
    const Packet& packet = packets_[id];
    hosts_[packet.destination].endpoint->receive(now_, packet.bytes);
    end(id, SimFate::kDelivered);
}

// ---- the program of a rank --------------------------------------------------------------------------------

void Sim::plan_entry(Rank rank) {
    Host& host = hosts_[rank];
    const Seq op = host.entered;
    if (host.entering || host.leaving) return;
    if (op >= spec_.ops_by_rank[rank]) {
        if (host.finished < op) return;
        host.leaving = true;
        host.linger_until = now_ + spec_.linger;
        host.endpoint->say_goodbye();
        schedule(now_, Kind::kWake, rank);  // a rank without ops has no other occasion to say it
        schedule(host.linger_until, Kind::kWake, rank);
        return;
    }
    Time from = host.last_entry;
    if (op >= spec_.depth) {
        if (host.finished <= op - spec_.depth) return;
        from = std::max(from, host.finished_at[op - spec_.depth]);
    }
    host.entering = true;
    host.enter_at = std::max(now_, from + spec_.compute[op][rank]);
    schedule(host.enter_at, Kind::kEnter, rank);
}

void Sim::enter(Rank rank) {
    Host& host = hosts_[rank];
    if (!spec_.resync_before.empty() && spec_.resync_before[rank] == host.entered) host.endpoint->resynced();
    host.entering = false;
    host.last_entry = now_;
    const Seq op = host.entered++;
    host.endpoint->submit(now_, op, buckets_[op][rank], terms_of(rank));
}

// After anything has happened to a rank: send what it wants to send, take its reports, set its timer.
void Sim::pump(Rank rank) {
    Host& host = hosts_[rank];
    for (;;) {
        Outgoing out;
        while (host.endpoint->transmit(now_, out)) send(rank, out);
        auto& reports = host.endpoint->reports();
        for (OpReport& report : reports) {
            ++host.finished;
            host.finished_at.push_back(now_);
            result_.reports[rank].push_back(std::move(report));
        }
        reports.clear();
        plan_entry(rank);
        if (!host.leaving || !host.endpoint->transmit(now_, out)) break;
        send(rank, out);
    }
    if (host.leaving && (host.endpoint->drained() || now_ >= host.linger_until)) {
        Outgoing out;
        host.endpoint->leave();
        while (host.endpoint->transmit(now_, out)) send(rank, out);
        host.closed = true;
        result_.closed_at[rank] = now_;
        --open_hosts_;
        return;
    }
    const Time next = std::max(now_, host.endpoint->next_timer());
    if (next < host.timer_at) {
        host.timer_at = next;
        schedule(next, Kind::kTimer, rank);
    }
}

// ---- the network ------------------------------------------------------------------------------------------

void Sim::send(Rank source, const Outgoing& out) {
    const wire::HeaderBytes head = wire::pack(out.header);
    const int copies = spec_.duplicate > 0 && chance() < spec_.duplicate ? 2 : 1;
    for (int copy = 0; copy < copies; ++copy) {
        const std::uint32_t id = new_packet(source, out.peer, head, out.payload);
        Host& host = hosts_[source];
        host.nic_free = std::max(now_, host.nic_free) + wire_time(packets_[id].bytes.size());
        const auto late =
            spec_.jitter > 0 ? static_cast<Duration>(chance() * static_cast<double>(spec_.jitter)) : 0;
        schedule(host.nic_free + spec_.delay + late, Kind::kArrive, out.peer, id);
    }
}

std::uint32_t Sim::new_packet(Rank source, Rank destination, std::span<const std::byte> head,
                              std::span<const std::byte> tail) {
    if (free_packets_.empty()) {
        free_packets_.push_back(static_cast<std::uint32_t>(packets_.size()));
        packets_.emplace_back();
    }
    const std::uint32_t id = free_packets_.back();
    free_packets_.pop_back();
    Packet& packet = packets_[id];
    packet.source = source;
    packet.destination = destination;
    packet.damaged = false;
    packet.bytes.resize(head.size() + tail.size());
    std::memcpy(packet.bytes.data(), head.data(), head.size());
    if (!tail.empty()) std::memcpy(packet.bytes.data() + head.size(), tail.data(), tail.size());
    return id;
}

void Sim::end(std::uint32_t id, SimFate fate) {
    note(id, fate);
    free_packets_.push_back(id);
}

void Sim::note(std::uint32_t id, SimFate fate) {
    ++result_.fates[static_cast<std::size_t>(fate)];
    if (!spec_.record) return;
    const Packet& packet = packets_[id];
    const wire::Parsed parsed = wire::parse(packet.bytes);
    if (parsed.ok && parsed.header.type != wire::Type::kData) return;
    const std::size_t payload = packet.bytes.size() - std::min(packet.bytes.size(), wire::kHeaderBytes);
    result_.record.push_back({now_, fate, packet.source, packet.destination, parsed.header,
                              static_cast<std::uint32_t>(payload), packet.damaged || !parsed.ok});
}

// Damage that passed the UDP checksum. Of a kind that the header's checks must catch: there is nothing to catch
// a flipped payload bit with.
void Sim::damage(Packet& packet) {
    packet.damaged = true;
    const auto where = static_cast<std::size_t>(chance() * 10);  // magic, version, type, flags, group tag
    const bool cut_short = chance() < 0.25;
    if (cut_short)
        packet.bytes.resize(where);
    else
        packet.bytes[where] ^= std::byte{0x90};
}

bool Sim::frozen(Rank rank) const {
    return std::any_of(spec_.freezes.begin(), spec_.freezes.end(), [&](const Freeze& freeze) {
        return freeze.rank == rank && freeze.from <= now_ && now_ < freeze.until;
    });
}

bool Sim::cut(Rank a, Rank b) const {
    return std::any_of(spec_.partitions.begin(), spec_.partitions.end(), [&](const Partition& partition) {
        const auto has = [&](Rank rank) {
            return std::find(partition.side.begin(), partition.side.end(), rank) != partition.side.end();
        };
        return partition.from <= now_ && now_ < partition.until && has(a) != has(b);
    });
}

}  // namespace

SimResult simulate(const SimSpec& spec, const std::vector<std::vector<std::span<float>>>& buckets) {
    return Sim(spec, buckets).run();
}

}  // namespace tailcut
