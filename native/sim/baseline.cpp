#include "sim/baseline.hpp"

#include <map>
#include <utility>

#include "sim/neighbours.hpp"

namespace tailcut::sim {
namespace {

enum Alarm : std::uint8_t { kFlow = Transport::kAlarm, kEnter, kThaw };

constexpr std::uint64_t kEventsPerGlance = 1 << 16;

std::uint64_t label_of(const Message& message) {
    return std::uint64_t{message.op} << 40 | std::uint64_t{message.step} << 24 | message.part;
}
Message message_of(Rank to, std::uint64_t label) {
    return {to, 0, static_cast<std::uint32_t>(label >> 40), static_cast<std::uint32_t>(label >> 24 & 0xFFFF),
            static_cast<std::uint32_t>(label & 0xFFFFFF)};
}

class Baseline {
public:
    explicit Baseline(const BaselineSpec& spec)
        : spec_(spec),
          network_(spec, spec.ranks, 0),
          neighbours_(spec, network_),
          freezes_(spec.freezes, spec.ranks),
          hangs_(spec.hangs, spec.ranks),
          transport_(spec.transport, network_, freezes_,
                     [this](Transport::FlowId flow, std::uint64_t label) { read(flow, label); }),
          collective_(make_collective(spec.algorithm, spec.ranks, spec.bucket_bytes, spec.part_bytes)),
          hosts_(spec.ranks) {
        for (const Freeze& freeze : spec.freezes)
            if (freeze.until != kNever) network_.alarm(freeze.until, freeze.rank, kThaw);
        for (Rank rank = 0; rank < spec.ranks; ++rank) plan_entry(rank);
    }

    BaselineResult run() {
        Happening happening;
        const std::uint64_t all = spec_.compute.size() * spec_.ranks;
        std::uint64_t glance_at = kEventsPerGlance;
        while (result_.ops.size() < all && network_.next(happening)) {
            if (network_.now() > last_end_ + spec_.give_up) break;
            take(happening);
            if (spec_.glance && network_.events() >= glance_at) {
                spec_.glance(result_.ops.size());
                glance_at = network_.events() + kEventsPerGlance;
            }
        }
        result_.network = network_.counters();
        result_.transport = transport_.counters();
        result_.events = network_.events();
        result_.ended_at = network_.now();
        return std::move(result_);
    }

private:
    struct Host {
        std::uint32_t entered = 0;  // ops entered
        bool inside = false, due = false;
        Time entered_at = 0;
        std::vector<Message> early;  // messages of the op that it has not entered yet
    };

    void take(const Happening& happening) {
        if (neighbours_.take(happening)) return;
        if (happening.kind == Happening::Kind::kAlarm)
            on_alarm(happening);
        else if (happening.kind == Happening::Kind::kDropped)
            transport_.dropped(happening.packet);
        else
            deliver(happening.packet);
    }

    void deliver(const Packet& packet) {
        const bool dead = freezes_.dead(packet.destination, network_.now());
        network_.count(dead ? Fate::kDeadHost : Fate::kDelivered);
        dead ? transport_.dropped(packet) : transport_.arrived(packet);
    }

    void on_alarm(const Happening& alarm) {
        if (alarm.alarm == kFlow) {
            if (!freezes_.dead(alarm.host, network_.now())) transport_.on_alarm(alarm.number);
            return;
        }
        if (alarm.alarm == kEnter) hosts_[alarm.host].due = true;
        if (freezes_.frozen(alarm.host, network_.now())) return;  // the thaw will handle it
        if (alarm.alarm == kThaw) transport_.thaw(alarm.host);
        if (std::exchange(hosts_[alarm.host].due, false)) enter(alarm.host);
    }

    void plan_entry(Rank rank) {
        const std::uint32_t op = hosts_[rank].entered;
        if (op < spec_.compute.size())
            network_.alarm(hangs_.done(rank, network_.now(), spec_.compute[op][rank]), rank, kEnter);
    }

    void enter(Rank rank) {
        Host& host = hosts_[rank];
        const std::uint32_t op = host.entered++;
        host.inside = true;
        host.entered_at = network_.now();
        std::vector<Message> out;
        const bool ended = collective_->enter(rank, op, out);
        send(rank, out);
        if (ended) return end(rank);
        for (const Message& message : std::exchange(host.early, {})) receive(rank, message);
    }

    // No rank is more than one op ahead: it would need what this rank sends in the op between.
    void read(Transport::FlowId flow, std::uint64_t label) {
        const Rank rank = transport_.destination(flow);
        const Message message = message_of(rank, label);
        if (hosts_[rank].inside && message.op + 1 == hosts_[rank].entered)
            receive(rank, message);
        else
            hosts_[rank].early.push_back(message);
    }

    void receive(Rank rank, const Message& message) {
        std::vector<Message> out;
        const bool ended = collective_->receive(rank, message, out);
        send(rank, out);
        if (ended) end(rank);
    }

    void send(Rank rank, const std::vector<Message>& out) {
        for (const Message& message : out) {
            const std::pair path(rank, message.to);
            auto at = flows_.find(path);
            if (at == flows_.end()) at = flows_.emplace(path, transport_.open(rank, message.to)).first;
            transport_.send(at->second, message.bytes, label_of(message));
        }
    }

    void end(Rank rank) {
        Host& host = hosts_[rank];
        host.inside = false;
        last_end_ = network_.now();
        result_.ops.push_back({rank, host.entered - 1, host.entered_at, network_.now()});
        plan_entry(rank);
    }

    const BaselineSpec& spec_;
    Network network_;
    Neighbours neighbours_;
    HostFreezes freezes_;
    const HostHangs hangs_;
    Transport transport_;
    std::unique_ptr<Collective> collective_;
    std::vector<Host> hosts_;
    std::map<std::pair<Rank, Rank>, Transport::FlowId> flows_;
    Time last_end_ = 0;
    BaselineResult result_;
};

}  // namespace

BaselineResult simulate_baseline(const BaselineSpec& spec) { return Baseline(spec).run(); }

}  // namespace tailcut::sim
