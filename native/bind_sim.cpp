// The Python bindings of the simulations: the network, endpoints in it, and baselines in it.
#include "bind_sim.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bind_bucket.hpp"
#include "bind_tables.hpp"
#include "drivers/simnet.hpp"
#include "sim/baseline.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace tailcut;

namespace {

using Counts = nb::typed<nb::dict, nb::str, std::uint64_t>;

Counts fates_of(const sim::NetworkCounters& counters) {
    constexpr const char* kNames[] = {"delivered",   "lost",        "queue_drop",
                                      "socket_drop", "partitioned", "dead_host"};
    Counts fates;
    for (std::size_t k = 0; k < counters.fates.size(); ++k) fates[kNames[k]] = counters.fates[k];
    return fates;
}

// Checks signals in between, so that Ctrl-C ends a long simulation.
std::function<void(std::uint64_t)> glance_of(std::function<void(std::uint64_t)> progress) {
    return [progress = std::move(progress)](std::uint64_t ended_ops) {
        const nb::gil_scoped_acquire acquire;
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
        if (progress) progress(ended_ops);
    };
}

// A DATA packet that an endpoint was handed intact.
struct Delivery {
    Time at;
    Rank source, destination;
    Seq seq;
    std::uint16_t epoch;
    bool gather, empty, over;
    Rank shard;
    std::uint32_t first, count, bucket_len;
    std::uint32_t payload_bytes, stated_payload_bytes;  // fewer than stated if it was trimmed

    template <typename Visit>
    static constexpr void visit_fields(Visit&& visit) {
        visit("at_ns", &Delivery::at);
        visit("source", &Delivery::source);
        visit("destination", &Delivery::destination);
        visit("seq", &Delivery::seq);
        visit("epoch", &Delivery::epoch);
        visit("gather", &Delivery::gather);
        visit("empty", &Delivery::empty);
        visit("over", &Delivery::over);
        visit("shard", &Delivery::shard);
        visit("first", &Delivery::first);
        visit("count", &Delivery::count);
        visit("bucket_len", &Delivery::bucket_len);
        visit("payload_bytes", &Delivery::payload_bytes);
        visit("stated_payload_bytes", &Delivery::stated_payload_bytes);
    }
};

std::vector<Delivery> deliveries_of(const SimResult& result) {
    std::vector<Delivery> deliveries;
    for (const SimPacket& p : result.record) {
        if (p.fate != SimFate::kDelivered || p.damaged) continue;
        const wire::Header& header = p.header;
        deliveries.push_back({p.at, p.source, p.destination, header.seq, header.epoch,
                              header.stage() == wire::Stage::kGather, header.empty(),
                              (header.flags & wire::kOver) != 0, header.shard, header.first, header.count,
                              header.bucket_len, p.payload_bytes,
                              static_cast<std::uint32_t>(wire::stated_payload_bytes(header))});
    }
    return deliveries;
}

// What became of a packet that carry() sent.
struct Arrival {
    Rank source, destination;
    std::uint32_t bytes, number;
    Time at;  // -1: it was dropped

    template <typename Visit>
    static constexpr void visit_fields(Visit&& visit) {
        visit("source", &Arrival::source);
        visit("destination", &Arrival::destination);
        visit("bytes", &Arrival::bytes);
        visit("number", &Arrival::number);
        visit("at_ns", &Arrival::at);
    }
};

void bind_network(nb::module_& m) {
    nb::class_<sim::NetworkSpec>(m, "NetworkSpec")
        .def(nb::init<>())
        .def_rw("seed", &sim::NetworkSpec::seed)
        .def_rw("loss", &sim::NetworkSpec::loss)
        .def_rw("duplicate", &sim::NetworkSpec::duplicate)
        .def_rw("corrupt", &sim::NetworkSpec::corrupt)
        .def_rw("trim", &sim::NetworkSpec::trim)
        .def_rw("trim_to_payload_bytes", &sim::NetworkSpec::trim_to_payload_bytes)
        .def_rw("trim_above_bytes", &sim::NetworkSpec::trim_above_bytes)
        .def_rw("delay_ns", &sim::NetworkSpec::delay)
        .def_rw("jitter_ns", &sim::NetworkSpec::jitter)
        .def_rw("bytes_per_s", &sim::NetworkSpec::bytes_per_s)
        .def_rw("uplink_bytes_per_s", &sim::NetworkSpec::uplink_bytes_per_s)
        .def_rw("queue_bytes", &sim::NetworkSpec::queue_bytes)
        .def_rw("frame_bytes", &sim::NetworkSpec::frame_bytes)
        .def(
            "partition",
            [](sim::NetworkSpec& spec, Time from_ns, Time until_ns, const std::vector<Rank>& side) {
                spec.partitions.push_back({from_ns, until_ns, side});
            },
            "from_ns"_a, "until_ns"_a, "side"_a)
        .def(
            "change_rate",
            [](sim::NetworkSpec& spec, Time at_ns, std::optional<Rank> host, double uplink_factor,
               double downlink_factor) {
                if (!(uplink_factor > 0 && downlink_factor > 0)) throw nb::value_error("factor");
                spec.rate_changes.push_back(
                    {at_ns, host.value_or(sim::RateChange::kAll), uplink_factor, downlink_factor});
            },
            "at_ns"_a, "host"_a.none(), "uplink_factor"_a, "downlink_factor"_a)
        .def(
            "set_bursts",
            [](sim::NetworkSpec& spec, std::uint64_t bytes, double bytes_per_s, std::uint32_t packet_bytes,
               Duration gap_min_ns, Duration gap_mean_ns) {
                // Without a gap, a burst would never end.
                if (packet_bytes == 0 || gap_min_ns + gap_mean_ns <= 0) throw nb::value_error("bursts");
                spec.bursts = {bytes, bytes_per_s, packet_bytes, gap_min_ns, gap_mean_ns};
            },
            "bytes"_a, "bytes_per_s"_a, "packet_bytes"_a, "gap_min_ns"_a, "gap_mean_ns"_a)
        .def(
            "set_neighbours",
            [](sim::NetworkSpec& spec, std::uint64_t flow_bytes, Duration gap_mean_ns,
               std::uint32_t segment_bytes, std::uint32_t header_bytes) {
                if (segment_bytes == 0 || gap_mean_ns <= 0) throw nb::value_error("neighbours");
                spec.neighbours = {flow_bytes, gap_mean_ns, segment_bytes, header_bytes};
            },
            "flow_bytes"_a, "gap_mean_ns"_a, "segment_bytes"_a, "header_bytes"_a)
        .def(
            "set_bursty_loss",
            [](sim::NetworkSpec& spec, double enter, double leave, double loss) {
                spec.bursty_loss = {enter, leave, loss};
            },
            "enter"_a, "leave"_a, "loss"_a)
        .def(
            "set_wan",
            [](sim::NetworkSpec& spec, Rank second_site, double bytes_per_s, Duration delay_ns, double loss,
               std::uint64_t queue_bytes) {
                spec.wan = {second_site, bytes_per_s, delay_ns, loss, queue_bytes};
            },
            "second_site"_a, "bytes_per_s"_a, "delay_ns"_a, "loss"_a, "queue_bytes"_a)
        .def(
            "set_machine",
            [](sim::NetworkSpec& spec, std::uint32_t cores, Duration packet_cost_ns,
               std::uint64_t bucket_bytes) { spec.machine = {cores, packet_cost_ns, bucket_bytes}; },
            "cores"_a, "packet_cost_ns"_a, "bucket_bytes"_a);
    m.def("burst_draw", &sim::burst_draw, "seed"_a, "port"_a, "burst"_a);
    nb::class_<sim::NetworkCounters>(m, "NetworkCounters")
        .def_prop_ro("fates", &fates_of)
        .def_ro("trimmed_packets", &sim::NetworkCounters::trimmed_packets)
        .def_ro("burst_packets", &sim::NetworkCounters::burst_packets)
        .def_ro("burst_drops", &sim::NetworkCounters::burst_drops)
        .def_ro("neighbour_packets", &sim::NetworkCounters::neighbour_packets)
        .def_ro("neighbour_drops", &sim::NetworkCounters::neighbour_drops);
    // Sends packets of the given sizes at the given times and returns a table of their arrivals. For tests of
    // the network alone.
    m.def(
        "carry",
        [](const sim::NetworkSpec& spec, Rank hosts,
           const std::vector<std::tuple<Time, Rank, std::vector<Rank>, std::uint32_t>>& sends) {
            sim::Network network(spec, hosts, wire::kHeaderBytes);
            for (std::uint32_t k = 0; k < sends.size(); ++k) network.alarm(std::get<0>(sends[k]), 0, 0, k);
            std::vector<Arrival> arrivals;
            sim::Happening happening;
            while (network.next(happening)) {
                if (happening.kind == sim::Happening::Kind::kAlarm) {
                    const auto& [at, source, destinations, bytes] = sends[happening.number];
                    network.send(source, destinations, bytes, happening.number, true);
                    continue;
                }
                const sim::Packet& packet = happening.packet;
                const bool arrived = happening.kind == sim::Happening::Kind::kArrived;
                arrivals.push_back({packet.source, packet.destination, packet.bytes, packet.tag,
                                    arrived ? network.now() : -1});
            }
            return table_of(std::move(arrivals));
        },
        "spec"_a, "hosts"_a, "sends"_a);
}

void bind_endpoints(nb::module_& m) {
    nb::class_<SimSpec, sim::NetworkSpec>(m, "SimSpec")
        .def(nb::init<>())
        .def_rw("ranks", &SimSpec::ranks)
        .def_rw("rows", &SimSpec::rows)
        .def_rw("socket_buffer_bytes", &SimSpec::socket_buffer_bytes)
        .def_prop_rw(
            "payload_bytes", [](const SimSpec& spec) { return spec.limits.payload_bytes; },
            [](SimSpec& spec, std::uint32_t bytes) { spec.limits.payload_bytes = bytes; })
        .def_prop_rw(
            "trim_payload_bytes", [](const SimSpec& spec) { return spec.limits.trim_payload_bytes; },
            [](SimSpec& spec, std::uint32_t bytes) { spec.limits.trim_payload_bytes = bytes; })
        .def_prop_rw(
            "codec", [](const SimSpec& spec) { return static_cast<int>(spec.codec); },
            [](SimSpec& spec, int codec) { spec.codec = static_cast<wire::Codec>(codec); })
        .def_rw("pool_bytes", &SimSpec::pool_bytes)
        .def_rw("window_ops", &SimSpec::window_ops)
        .def_rw("first_seq", &SimSpec::first_seq)
        .def_rw("terms", &SimSpec::terms)
        .def_rw("planes_by_rank", &SimSpec::planes_by_rank)
        .def_rw("linger_ns", &SimSpec::linger)
        .def_rw("compute_ns", &SimSpec::compute)
        .def_rw("ops_by_rank", &SimSpec::ops_by_rank)
        .def_rw("resync_before", &SimSpec::resync_before)
        .def_rw("loss_scale_tags", &SimSpec::loss_scale_tags)
        .def_rw("skips", &SimSpec::skips)
        .def_rw("depth", &SimSpec::depth)
        .def_rw("buckets", &SimSpec::buckets)
        .def_rw("carry", &SimSpec::carry)
        .def_rw("residues", &SimSpec::residues)
        .def_rw("stand_in", &SimSpec::stand_in)
        .def_rw("attendance", &SimSpec::attendance)
        .def_rw("decide", &SimSpec::decide, nb::arg().none())
        .def_rw("observe", &SimSpec::observe, nb::arg().none())
        .def_rw("agree", &SimSpec::agree, nb::arg().none())
        .def_rw("record", &SimSpec::record)
        .def_rw("summaries", &SimSpec::summaries)
        .def_rw("elided", &SimSpec::elided)
        .def_rw("resend", &SimSpec::resend)
        .def_rw("paced", &SimSpec::paced)
        .def_rw("multicast", &SimSpec::multicast)
        .def_rw("deaf", &SimSpec::deaf)
        .def(
            "rely",
            [](SimSpec& spec, std::uint32_t first, std::uint32_t count) {
                spec.reliable.push_back({first, count});
            },
            "first"_a, "count"_a)
        .def(
            "freeze",
            [](SimSpec& spec, Rank rank, Time from_ns, std::optional<Time> until_ns) {
                spec.freezes.push_back({rank, from_ns, until_ns.value_or(kNever)});
            },
            "rank"_a, "from_ns"_a, "until_ns"_a.none())
        .def(
            "hang",
            [](SimSpec& spec, Rank rank, Time from_ns, Time until_ns, bool announced) {
                spec.hangs.push_back({rank, from_ns, until_ns, announced});
            },
            "rank"_a, "from_ns"_a, "until_ns"_a, "announced"_a)
        .def(
            "inject",
            [](SimSpec& spec, Time at_ns, Rank destination, const nb::bytes& datagram) {
                const std::span bytes(static_cast<const std::byte*>(datagram.data()), datagram.size());
                spec.injections.push_back({at_ns, destination, {bytes.begin(), bytes.end()}});
            },
            "at_ns"_a, "destination"_a, "datagram"_a)
        // The deeds of ranks with blobs; a grid has none.
        .def(
            "offer",
            [](SimSpec& spec, Time at_ns, Rank rank, std::uint64_t id, const nb::bytes& blob) {
                const auto* const begin = static_cast<const std::byte*>(blob.data());
                spec.state_deeds.push_back(
                    {StateDeed::Kind::kOffer, at_ns, rank, id,
                     std::make_shared<const std::vector<std::byte>>(begin, begin + blob.size())});
            },
            "at_ns"_a, "rank"_a, "id"_a, "blob"_a)
        .def(
            "withdraw",
            [](SimSpec& spec, Time at_ns, Rank rank, std::uint64_t id) {
                spec.state_deeds.push_back({StateDeed::Kind::kWithdraw, at_ns, rank, id, nullptr});
            },
            "at_ns"_a, "rank"_a, "id"_a)
        .def(
            "fetch",  // returns the ticket
            [](SimSpec& spec, Time at_ns, Rank rank, Rank server, std::uint64_t id,
               std::uint64_t most_bytes) {
                const Ticket ticket = spec.state_deeds.size();
                spec.state_deeds.push_back(
                    {StateDeed::Kind::kFetch, at_ns, rank, id, nullptr, server, most_bytes, ticket});
                return ticket;
            },
            "at_ns"_a, "rank"_a, "server"_a, "id"_a, "most_bytes"_a)
        .def(
            "cancel",  // a fetch of this rank that is still under way then
            [](SimSpec& spec, Time at_ns, Rank rank, Ticket ticket) {
                spec.state_deeds.push_back({StateDeed::Kind::kCancel, at_ns, rank, 0, nullptr, 0, 0, ticket});
            },
            "at_ns"_a, "rank"_a, "ticket"_a);
    nb::class_<SimResult>(m, "SimResult")
        .def_ro("reports", &SimResult::reports)
        .def_ro("served", &SimResult::served)
        .def_ro("open", &SimResult::open)
        .def_ro("counters", &SimResult::counters)
        .def_ro("closed_at_ns", &SimResult::closed_at)
        .def_ro("wanted", &SimResult::wanted)  // of a flat group: by rank, what others wanted, by rank
        .def_ro("events", &SimResult::events)
        .def_ro("ended_at_ns", &SimResult::ended_at)
        .def_prop_ro("fates", [](const SimResult& result) { return fates_of(result.network); })
        .def_ro("network", &SimResult::network)
        .def_prop_ro("fetched",  // (rank, at_ns, ticket, status, bytes)
                     [](const SimResult& result) {
                         std::vector<std::tuple<Rank, Time, Ticket, int, nb::bytes>> rows;
                         for (const auto& [rank, at, fetched] : result.fetched)
                             rows.emplace_back(rank, at, fetched.ticket, static_cast<int>(fetched.status),
                                               nb::bytes(fetched.bytes.data(), fetched.bytes.size()));
                         return rows;
                     })
        .def("summaries", [](const SimResult& result) { return table_of(result.summaries); })
        .def("deliveries", [](const SimResult& result) { return table_of(deliveries_of(result)); });
    m.def(
        "packet_granules",
        [](int codec, int planes, std::uint32_t payload_bytes, std::uint32_t trim_payload_bytes) {
            return codec::PacketLimits{payload_bytes, trim_payload_bytes}.granules(
                static_cast<wire::Codec>(codec), planes);
        },
        "codec"_a, "planes"_a, "payload_bytes"_a, "trim_payload_bytes"_a);
    m.def(
        "simulate",
        [](const SimSpec& given, const std::vector<std::vector<Bucket>>& buckets,
           std::function<void(std::uint64_t)> progress) {
            std::vector<std::vector<std::span<float>>> spans;
            for (const auto& op : buckets) {
                auto& row = spans.emplace_back();
                for (const auto& bucket : op) row.push_back(floats_of(bucket));
            }
            SimSpec spec = given;
            spec.glance = glance_of(std::move(progress));
            // Hooks acquire the GIL themselves, which is cheap while nobody else wants it.
            const nb::gil_scoped_release release;
            return simulate(spec, spans);
        },
        "spec"_a, "buckets"_a, "progress"_a.none() = nb::none());
}

void bind_baselines(nb::module_& m) {
    using sim::BaselineSpec;
    nb::enum_<sim::Algorithm>(m, "Algorithm")
        .value("RING", sim::Algorithm::kRing)
        .value("TREE", sim::Algorithm::kTree);
    nb::class_<BaselineSpec, sim::NetworkSpec>(m, "BaselineSpec")
        .def(nb::init<>())
        .def_rw("ranks", &BaselineSpec::ranks)
        .def_rw("algorithm", &BaselineSpec::algorithm)
        .def_rw("bucket_bytes", &BaselineSpec::bucket_bytes)
        .def_rw("part_bytes", &BaselineSpec::part_bytes)
        .def_rw("compute_ns", &BaselineSpec::compute)
        .def_rw("give_up_ns", &BaselineSpec::give_up)
        .def(
            "set_transport",
            [](BaselineSpec& spec, std::uint32_t segment_bytes, std::uint32_t header_bytes,
               std::uint64_t receive_buffer_bytes, Duration least_rto_ns) {
                if (segment_bytes == 0) throw nb::value_error("segment_bytes");
                spec.transport.segment_bytes = segment_bytes;
                spec.transport.header_bytes = header_bytes;
                spec.transport.receive_buffer_bytes = receive_buffer_bytes;
                spec.transport.least_rto = least_rto_ns;
            },
            "segment_bytes"_a, "header_bytes"_a, "receive_buffer_bytes"_a, "least_rto_ns"_a)
        .def(
            "freeze",
            [](BaselineSpec& spec, Rank rank, Time from_ns, std::optional<Time> until_ns) {
                spec.freezes.push_back({rank, from_ns, until_ns.value_or(kNever)});
            },
            "rank"_a, "from_ns"_a, "until_ns"_a.none())
        .def(
            "hang",
            [](BaselineSpec& spec, Rank rank, Time from_ns, Time until_ns) {
                spec.hangs.push_back({rank, from_ns, until_ns});
            },
            "rank"_a, "from_ns"_a, "until_ns"_a);
    nb::class_<sim::BaselineResult>(m, "BaselineResult")
        .def("ops", [](const sim::BaselineResult& result) { return table_of(result.ops); })
        .def_ro("network", &sim::BaselineResult::network)
        .def_prop_ro("segments", [](const sim::BaselineResult& r) { return r.transport.segments; })
        .def_prop_ro("resent_segments",
                     [](const sim::BaselineResult& r) { return r.transport.resent_segments; })
        .def_prop_ro("probes", [](const sim::BaselineResult& r) { return r.transport.probes; })
        .def_prop_ro("timeouts", [](const sim::BaselineResult& r) { return r.transport.timeouts; })
        .def_prop_ro("acks", [](const sim::BaselineResult& r) { return r.transport.acks; })
        .def_ro("events", &sim::BaselineResult::events)
        .def_ro("ended_at_ns", &sim::BaselineResult::ended_at);
    m.def(
        "simulate_baseline",
        [](const BaselineSpec& given, std::function<void(std::uint64_t)> progress) {
            BaselineSpec spec = given;
            spec.glance = glance_of(std::move(progress));
            const nb::gil_scoped_release release;
            return sim::simulate_baseline(spec);
        },
        "spec"_a, "progress"_a.none() = nb::none());
}

}  // namespace

void bind_sim(nb::module_& m) {
    bind_network(m);
    bind_endpoints(m);
    bind_baselines(m);
}
