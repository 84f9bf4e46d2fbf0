#include "sim/network.hpp"

#include <algorithm>
#include <cmath>

namespace tailcut::sim {
namespace {

double unit(std::uint64_t bits) { return static_cast<double>(bits >> 11) * 0x1p-53; }

}  // namespace

double burst_draw(std::uint64_t seed, Rank port, std::uint64_t burst) {
    return -std::log1p(-unit(mix(~seed ^ mix(std::uint64_t{port} << 40 | burst))));
}

Network::Network(const NetworkSpec& spec, Rank hosts, std::uint32_t header_bytes)
    : spec_(spec), header_bytes_(header_bytes), hosts_(hosts), cores_(spec.machine.cores) {
    const double uplink = spec.uplink_bytes_per_s < 0 ? spec.bytes_per_s : spec.uplink_bytes_per_s;
    for (Host& host : hosts_) {
        host.nic = Link(uplink, spec.machine.bucket_bytes);
        host.port = Link(spec.bytes_per_s, spec.machine.bucket_bytes);
    }
    for (Pipe& pipe : wan_) pipe.link = Link(spec.wan.bytes_per_s);
    std::vector<RateChange> changes = spec.rate_changes;
    std::stable_sort(changes.begin(), changes.end(),
                     [](const RateChange& a, const RateChange& b) { return a.at < b.at; });
    for (const RateChange& change : changes)
        for (Rank host = 0; host < hosts; ++host)
            if (change.host == host || change.host == RateChange::kAll) {
                hosts_[host].nic.change(change.at, change.uplink_factor);
                hosts_[host].port.change(change.at, change.downlink_factor);
            }
    for (Rank host = 0; spec.bursts.bytes > 0 && host < hosts; ++host) plan_burst(host);
}

std::uint32_t Network::send(Rank source, std::span<const Rank> destinations, std::uint32_t bytes,
                            std::uint32_t tag, bool trimmable) {
    const std::uint32_t copies = spec_.duplicate > 0 && chance() < spec_.duplicate ? 2 : 1;
    const Rank port = port_of(source);
    Host& host = hosts_[port];
    for (std::uint32_t copy = 0; copy < copies; ++copy) {
        const Time leaves = host.nic.carry(now_, std::uint64_t{bytes} + spec_.frame_bytes);
        for (const Rank destination : destinations) {
            if (free_.empty()) {
                free_.push_back(static_cast<std::uint32_t>(carried_.size()));
                carried_.emplace_back();
            }
            const std::uint32_t id = free_.back();
            free_.pop_back();
            carried_[id] = {{source, destination, bytes, tag, {}}, trimmable, 0, 0, Line::kEmpty};
            append(host.leaving, id, leaves + spec_.delay, Kind::kSwitch, port);
            foreground_ += !is_neighbour(source);
        }
    }
    return copies * static_cast<std::uint32_t>(destinations.size());
}

Duration Network::idle_round_trip(Rank a, Rank b) const {
    const bool crosses = in_second_site(a) != in_second_site(b);
    return 2 * (spec_.delay + (crosses ? spec_.wan.delay : 0)) + spec_.jitter;
}

void Network::alarm(Time at, Rank host, std::uint8_t alarm, std::uint32_t number) {
    schedule(std::max(at, now_), Kind::kAlarm, host, number, alarm);
    foreground_ += !is_neighbour(host);
}

bool Network::next(Happening& happening) {
    while (foreground_ > 0) {
        const Event event = events_.top();
        events_.pop();
        now_ = event.at;
        ++events_count_;
        if (handle(event, happening)) return true;
    }
    return false;
}

bool Network::handle(const Event& event, Happening& happening) {
    switch (event.kind) {
        case Kind::kSwitch:
            return reach_switch(take(hosts_[event.host].leaving, Kind::kSwitch, event.host), happening);
        case Kind::kRoute:
            return route(event.number, happening);
        case Kind::kWan:
            return arrive(take(wan_[event.host].line, Kind::kWan, event.host), happening);
        case Kind::kPort:
            return leave_port(take(hosts_[event.host].queued, Kind::kPort, event.host), happening);
        case Kind::kSlip:
            return leave_port(event.number, happening);
        case Kind::kCore:
            return over(take(on_cores_, Kind::kCore, 0), Fate::kDelivered, happening);
        case Kind::kBurst:
            burst(event.host);
            return false;
        case Kind::kAlarm:
            foreground_ -= !is_neighbour(event.host);
            happening.kind = Happening::Kind::kAlarm;
            happening.host = event.host;
            happening.alarm = event.alarm;
            happening.number = event.number;
            return true;
    }
    return false;
}

void Network::append(Line& line, std::uint32_t id, Time at, Kind kind, Rank host) {
    carried_[id].at = at;
    carried_[id].order = order_++;
    carried_[id].next = Line::kEmpty;
    if (line.first == Line::kEmpty) {
        line.first = id;
        events_.push({at, carried_[id].order, kind, 0, host, 0});
    } else {
        carried_[line.last].next = id;
    }
    line.last = id;
}

std::uint32_t Network::take(Line& line, Kind kind, Rank host) {
    const std::uint32_t id = line.first;
    line.first = carried_[id].next;
    if (line.first != Line::kEmpty) {
        const Carried& first = carried_[line.first];
        events_.push({first.at, first.order, kind, 0, host, 0});
    }
    return id;
}

bool Network::reach_switch(std::uint32_t id, Happening& happening) {
    if (spec_.jitter == 0) return route(id, happening);
    const auto late = static_cast<Duration>(chance() * static_cast<double>(spec_.jitter));
    schedule(now_ + late, Kind::kRoute, 0, id);
    return false;
}

bool Network::route(std::uint32_t id, Happening& happening) {
    const Packet& packet = carried_[id].packet;
    const bool crosses = in_second_site(packet.source) != in_second_site(packet.destination);
    return crosses ? enter_wan(id, happening) : arrive(id, happening);
}

// A packet reaches the switch of its destination.
bool Network::arrive(std::uint32_t id, Happening& happening) {
    Carried& carried = carried_[id];
    const Packet& packet = carried.packet;
    if (!spec_.partitions.empty() && cut(packet.source, packet.destination))
        return over(id, Fate::kPartitioned, happening);
    const Rank port = port_of(packet.destination);
    Host& host = hosts_[port];
    if (lost(host)) return over(id, Fate::kLost, happening);
    bool slips = false;
    trim(carried, host, slips);
    if (full(host.port, spec_.queue_bytes, framed(packet))) return over(id, Fate::kQueueDrop, happening);
    if (spec_.corrupt > 0 && chance() < spec_.corrupt) {
        // These bytes are magic, version, type, flags and tag.
        carried.packet.damage.at = static_cast<std::uint8_t>(chance() * 10);
        carried.packet.damage.cut_short = chance() < 0.25;
    }
    const Time starts = std::max(now_, host.port.free_at());
    const Time leaves = host.port.carry(now_, framed(packet));
    if (leaves == now_ && host.queued.first == Line::kEmpty) return leave_port(id, happening);
    if (slips) {  // it passes the queue; packets behind it are delayed by its bytes
        host.slip = std::max(now_, host.slip) + leaves - starts;
        schedule(host.slip, Kind::kSlip, port, id);
    } else {
        append(host.queued, id, leaves, Kind::kPort, port);
    }
    return false;
}

// The first core that is free takes the packet. As all packets cost the same, they are done in the order in which they
// came.
bool Network::leave_port(std::uint32_t id, Happening& happening) {
    if (cores_.empty()) return over(id, Fate::kDelivered, happening);
    Time& core = *std::min_element(cores_.begin(), cores_.end());
    core = std::max(now_, core) + spec_.machine.packet_cost;
    append(on_cores_, id, core, Kind::kCore, 0);
    return false;
}

double Network::chance() { return unit(mix(spec_.seed ^ mix(draws_++))); }

bool Network::lost(Host& host) {
    if (const BurstyLoss& bursty = spec_.bursty_loss; bursty.enter > 0) {
        if (chance() < (host.bad ? bursty.leave : bursty.enter)) host.bad = !host.bad;
        if (host.bad && chance() < bursty.loss) return true;
    }
    return spec_.loss > 0 && chance() < spec_.loss;
}

// As the testbed's switch does: trims at random, and whenever the backlog is too long.
void Network::trim(Carried& carried, Host& host, bool& slips) {
    const std::uint32_t least = header_bytes_ + spec_.trim_to_payload_bytes;
    Packet& packet = carried.packet;
    if (!carried.trimmable || packet.bytes <= least) return;
    const bool by_chance = spec_.trim > 0 && chance() < spec_.trim;
    const bool crowded =
        spec_.trim_above_bytes > 0 && host.port.backlog_bytes(now_) + static_cast<double>(framed(packet)) >
                                          static_cast<double>(spec_.trim_above_bytes);
    if (!by_chance && !crowded) return;
    const auto payload = static_cast<double>(packet.bytes - header_bytes_);
    packet.bytes = spec_.trim_to_payload_bytes > 0
                       ? least
                       : header_bytes_ + static_cast<std::uint32_t>(chance() * payload);
    ++counters_.trimmed_packets;
    slips = true;
}

bool Network::enter_wan(std::uint32_t id, Happening& happening) {
    const Packet& packet = carried_[id].packet;
    const Rank to = in_second_site(packet.destination) ? 1 : 0;
    if (spec_.wan.loss > 0 && chance() < spec_.wan.loss) return over(id, Fate::kLost, happening);
    if (full(wan_[to].link, spec_.wan.queue_bytes, framed(packet)))
        return over(id, Fate::kQueueDrop, happening);
    const Time leaves = wan_[to].link.carry(now_, framed(packet));
    append(wan_[to].line, id, leaves + spec_.wan.delay, Kind::kWan, to);
    return false;
}

bool Network::full(Link& link, std::uint64_t queue_bytes, std::uint64_t bytes) {
    if (queue_bytes == 0 || link.unlimited()) return false;
    return link.backlog_bytes(now_) + static_cast<double>(bytes) > static_cast<double>(queue_bytes);
}

bool Network::over(std::uint32_t id, Fate fate, Happening& happening) {
    happening.kind = fate == Fate::kDelivered ? Happening::Kind::kArrived : Happening::Kind::kDropped;
    happening.fate = fate;
    happening.packet = carried_[id].packet;
    free_.push_back(id);
    if (is_neighbour(happening.packet.source)) {
        ++counters_.neighbour_packets;
        counters_.neighbour_drops += fate != Fate::kDelivered;
    } else {
        --foreground_;
        if (fate != Fate::kDelivered) count(fate);
    }
    return true;
}

void Network::plan_burst(Rank host) {
    const double drawn = burst_draw(spec_.seed, host, hosts_[host].bursts++);
    const Bursts& bursts = spec_.bursts;
    hosts_[host].burst_left = bursts.bytes;
    const double gap = static_cast<double>(bursts.gap_min) + drawn * static_cast<double>(bursts.gap_mean);
    hosts_[host].burst_at += static_cast<Duration>(gap);
    schedule(std::max(now_, hosts_[host].burst_at), Kind::kBurst, host);
}

void Network::burst(Rank rank) {
    Host& host = hosts_[rank];
    const Bursts& bursts = spec_.bursts;
    while (host.burst_left > 0) {
        const std::uint64_t bytes = std::min<std::uint64_t>(host.burst_left, bursts.packet_bytes);
        host.burst_left -= bytes;
        const bool dropped = full(host.port, spec_.queue_bytes, bytes);
        ++counters_.burst_packets;
        counters_.burst_drops += dropped;
        if (!dropped) host.port.carry(now_, bytes);
        if (bursts.bytes_per_s > 0 && host.burst_left > 0) {
            const double takes_ns = static_cast<double>(bytes) / bursts.bytes_per_s * 1e9;
            return schedule(now_ + static_cast<Duration>(takes_ns), Kind::kBurst, rank);
        }
    }
    plan_burst(rank);
}

bool Network::cut(Rank a, Rank b) const {
    return std::any_of(spec_.partitions.begin(), spec_.partitions.end(), [&](const Partition& partition) {
        const auto has = [&](Rank host) {
            return std::find(partition.side.begin(), partition.side.end(), port_of(host)) !=
                   partition.side.end();
        };
        return partition.from <= now_ && now_ < partition.until && has(a) != has(b);
    });
}

}  // namespace tailcut::sim
