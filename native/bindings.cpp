// The core's Python bindings: argument conversion and GIL release, no logic.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>

#include "bind_bucket.hpp"
#include "bind_codec.hpp"
#include "bind_ledger.hpp"
#include "bind_reports.hpp"
#include "bind_sim.hpp"
#include "drivers/udp.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace tailcut;

namespace {

using Bytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FetchedBytes = nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>;

std::span<const std::byte> span_of(const nb::bytes& bytes) {
    return {static_cast<const std::byte*>(bytes.data()), bytes.size()};
}

using FirstAndCount = std::pair<std::uint32_t, std::uint32_t>;

std::vector<CoordRun> runs_of(const std::vector<FirstAndCount>& pairs) {
    std::vector<CoordRun> runs;
    for (const auto& [first, count] : pairs) runs.push_back({first, count});
    return runs;
}

using IpAndPort = std::pair<std::uint32_t, std::uint16_t>;

std::vector<Address> addresses_of(const std::vector<IpAndPort>& pairs) {
    std::vector<Address> addresses;
    for (const auto& [ipv4, port] : pairs) addresses.push_back({ipv4, port});
    return addresses;
}

void check_weights(const std::vector<std::uint16_t>& weights, std::size_t ranks) {
    if (weights.size() != ranks) throw nb::value_error("weights: one for each rank");
    if (std::all_of(weights.begin(), weights.end(), [](std::uint16_t weight) { return weight == 0; }))
        throw nb::value_error("weights: one must be above 0");
}

void bind_wire(nb::module_& m) {
    nb::class_<wire::Header>(m, "Header")
        .def(nb::init<>())
        .def_prop_rw(
            "type", [](const wire::Header& h) { return static_cast<int>(h.type); },
            [](wire::Header& h, int type) { h.type = static_cast<wire::Type>(type); })
        .def_rw("flags", &wire::Header::flags)
        .def_rw("group_tag", &wire::Header::group_tag)
        .def_rw("number", &wire::Header::number)
        .def_rw("incast", &wire::Header::incast)
        .def_rw("source", &wire::Header::source)
        .def_rw("shard", &wire::Header::shard)
        .def_rw("seq", &wire::Header::seq)
        .def_rw("bucket_len", &wire::Header::bucket_len)
        .def_rw("first", &wire::Header::first)
        .def_rw("echo_us", &wire::Header::echo_us)
        .def_rw("arrival_us", &wire::Header::arrival_us)
        .def_rw("delay_us", &wire::Header::delay_us)
        .def_rw("latest", &wire::Header::latest)
        .def_rw("report_words", &wire::Header::report_words)
        .def_rw("share", &wire::Header::share)
        .def_rw("count", &wire::Header::count)
        .def_rw("key", &wire::Header::key)
        .def_rw("epoch", &wire::Header::epoch)
        .def_rw("incarnation", &wire::Header::incarnation)
        .def_rw("loss_scale_tag", &wire::Header::loss_scale_tag)
        .def_rw("stands_for", &wire::Header::stands_for)
        .def_rw("error_energy", &wire::Header::error_energy)
        .def_rw("error_op", &wire::Header::error_op)
        .def_rw("served_from", &wire::Header::served_from)
        .def_rw("stamp_us", &wire::Header::stamp_us)
        .def_rw("entry_us", &wire::Header::entry_us)
        .def_prop_rw(
            "codec", [](const wire::Header& h) { return static_cast<int>(h.codec); },
            [](wire::Header& h, int codec) { h.codec = static_cast<wire::Codec>(codec); })
        .def_rw("planes", &wire::Header::planes)
        .def_rw("scale", &wire::Header::scale)
        .def_rw("lr_scale", &wire::Header::lr_scale)
        .def_rw("lr_period", &wire::Header::lr_period)
        .def_rw("gain_full", &wire::Header::gain_full)
        .def_rw("gain_one", &wire::Header::gain_one)
        .def_rw("blob_id", &wire::Header::blob_id)
        .def_rw("blob_first", &wire::Header::blob_first)
        .def_rw("blob_bytes", &wire::Header::blob_bytes)
        .def_rw("run_bytes", &wire::Header::run_bytes)
        .def_rw("edition", &wire::Header::edition)
        .def_prop_ro("stated_payload_bytes", &wire::stated_payload_bytes)
        .def("pack", [](const wire::Header& header) {
            const auto bytes = wire::pack(header);
            return nb::bytes(bytes.data(), bytes.size());
        });
    m.def(
        "parse_header",
        [](const nb::bytes& datagram) {
            const auto parsed = wire::parse(span_of(datagram));
            return std::pair(parsed.ok ? std::optional(parsed.header) : std::nullopt,
                             std::string(parsed.ok ? "" : wire::name(parsed.reason)));
        },
        "datagram"_a);
    m.attr("HEADER_BYTES") = wire::kHeaderBytes;
    m.attr("GRANULE") = kGranule;
    m.attr("TAGS") = wire::kTagMask + 1;
    m.attr("REJOIN_IDS") = kRejoinIds;
    m.def(
        "owner_of",
        [](Rank shard, Seq seq, Rank ranks, std::uint64_t seed, std::uint32_t key) {
            return Plan({0, ranks, seed}, seq, {0, key}).owner(shard);
        },
        "shard"_a, "seq"_a, "ranks"_a, "seed"_a, "key"_a = 0);
    m.def(
        "shard_range",
        // `weights` are of the owners, by shard; none: all own alike.
        [](std::uint32_t bucket_len, Rank ranks, Rank shard, const std::vector<std::uint16_t>& weights) {
            if (!weights.empty()) check_weights(weights, ranks);
            const std::optional<OwnerWeights> owners =
                weights.empty() ? std::nullopt : std::optional<OwnerWeights>(weights);
            const Layout layout{bucket_len, ranks, owners ? &*owners : nullptr};
            return std::pair(layout.begin(shard), layout.begin(shard) + layout.length(shard));
        },
        "bucket_len"_a, "ranks"_a, "shard"_a, "weights"_a = std::vector<std::uint16_t>{});
    nb::class_<Epoch>(m, "Epoch")
        .def(
            "__init__",
            [](Epoch* self, std::uint16_t number, Seq first_seq, const std::vector<std::uint16_t>& weights,
               const std::vector<Rank>& members) {
                check_weights(weights, weights.size());
                std::vector<bool> among(weights.size());
                for (const Rank member : members) {
                    if (member >= weights.size()) throw nb::value_error("members: not a rank");
                    among[member] = true;
                }
                new (self) Epoch{number, first_seq, OwnerWeights(weights), std::move(among)};
            },
            "number"_a, "first_seq"_a, "weights"_a, "members"_a)
        .def_ro("number", &Epoch::number)
        .def_ro("first_seq", &Epoch::first_seq);
}

void bind_terms(nb::module_& m) {
    nb::class_<Bounds>(m, "Bounds")
        .def(
            "__init__",
            [](Bounds* self, Duration scatter_ns, Duration scatter_cap_ns, Duration gather_ns,
               Duration scatter_grace_ns, Duration gather_grace_ns, Duration deadline_ns,
               Duration absent_ns) {
                new (self) Bounds{scatter_ns,      scatter_cap_ns, gather_ns, scatter_grace_ns,
                                  gather_grace_ns, deadline_ns,    absent_ns};
            },
            "scatter_ns"_a, "scatter_cap_ns"_a, "gather_ns"_a, "scatter_grace_ns"_a, "gather_grace_ns"_a,
            "deadline_ns"_a, "absent_ns"_a = 0)
        .def_ro("scatter_ns", &Bounds::scatter)
        .def_ro("scatter_cap_ns", &Bounds::scatter_cap)
        .def_ro("gather_ns", &Bounds::gather)
        .def_ro("scatter_grace_ns", &Bounds::scatter_grace)
        .def_ro("gather_grace_ns", &Bounds::gather_grace)
        .def_ro("deadline_ns", &Bounds::deadline)
        .def_ro("absent_ns", &Bounds::absent);
    m.attr("CARRIED_PLANES") = kCarriedPlanes;
    nb::class_<Terms>(m, "Terms")
        .def(
            "__init__",
            [](Terms* self, const Bounds& bounds, int planes, std::uint8_t incast,
               std::optional<int> gather_planes, bool whole, float skip_above, float lr_scale,
               std::uint16_t lr_period, std::uint32_t key, std::uint16_t loss_scale_tag, bool contribute) {
                for (const int count : {planes, gather_planes.value_or(planes)})
                    if (count < 1 || count > wire::kMaxPlanes) throw nb::value_error("planes");
                if (!(lr_scale >= 0 && lr_scale <= 1)) throw nb::value_error("lr_scale");
                new (self) Terms{bounds, {planes, whole}, {gather_planes.value_or(planes), whole},
                                 incast, skip_above,      {lr_scale, lr_period},
                                 key,    loss_scale_tag,  contribute};
            },
            "bounds"_a, "planes"_a, "incast"_a = 0, "gather_planes"_a = nb::none(), "whole"_a = false,
            "skip_above"_a = 0.0f, "lr_scale"_a = 0.0f, "lr_period"_a = 0, "key"_a = 0,
            "loss_scale_tag"_a = 0, "contribute"_a = true)
        .def(
            "with_column",  // of a grid
            [](Terms terms, const Bounds& bounds, std::uint8_t incast) {
                terms.column_bounds = bounds;
                terms.column_incast = incast;
                return terms;
            },
            "bounds"_a, "incast"_a = 0)
        .def_ro("bounds", &Terms::bounds)
        .def_prop_ro("planes", [](const Terms& terms) { return terms.scatter.planes; })
        .def_prop_ro("gather_planes", [](const Terms& terms) { return terms.gather.planes; })
        .def_prop_ro("whole", [](const Terms& terms) { return terms.scatter.whole; })
        .def_ro("incast", &Terms::incast);
}

void bind_udp(nb::module_& m) {
    nb::class_<SocketCounters>(m, "SocketCounters")
        .def_ro("send_calls", &SocketCounters::send_calls)
        .def_ro("receive_calls", &SocketCounters::receive_calls)
        .def_ro("segmented_sends", &SocketCounters::segmented_sends)
        .def_ro("coalesced_receives", &SocketCounters::coalesced_receives)
        .def_ro("blocked_sends", &SocketCounters::blocked_sends)
        .def_ro("failed_sends", &SocketCounters::failed_sends);
    nb::class_<LaneStats>(m, "LaneStats")
        .def_ro("protocol", &LaneStats::protocol)
        .def_ro("socket", &LaneStats::socket)
        .def_ro("uncorrected_packets", &LaneStats::uncorrected_packets)
        .def_ro("pool_used_bytes", &LaneStats::pool_used_bytes)
        .def_ro("memory_bytes", &LaneStats::memory_bytes)
        .def_ro("rtt_ns", &LaneStats::rtt)
        .def_ro("contributing", &LaneStats::contributing);
    nb::class_<PeerSettings>(m, "PeerSettings")
        .def(
            "__init__",
            [](PeerSettings* self, std::uint32_t window_bytes, std::uint64_t pool_bytes,
               std::uint32_t payload_bytes, std::uint32_t trim_payload_bytes, bool paced) {
                new (self) PeerSettings{window_bytes, pool_bytes, {payload_bytes, trim_payload_bytes}, paced};
            },
            "window_bytes"_a, "pool_bytes"_a, "payload_bytes"_a, "trim_payload_bytes"_a, "paced"_a)
        .def_prop_ro("payload_bytes", [](const PeerSettings& peer) { return peer.limits.payload_bytes; })
        .def_prop_ro("trim_payload_bytes",
                     [](const PeerSettings& peer) { return peer.limits.trim_payload_bytes; });
    m.def("credit_window_bytes", &credit_window_bytes, "buffer_bytes"_a, "ranks"_a);
    m.def(
        "grid_tags",
        [](std::uint64_t group_tag, Rank rank, Rank ranks, Rank rows) {
            if (rows == 0 || ranks % rows != 0) throw nb::value_error("rows");
            return tags_to(group_tag, rank, ranks, rows);
        },
        "group_tag"_a, "rank"_a, "ranks"_a, "rows"_a);
    nb::class_<UdpLane>(m, "UdpLane")
        .def(nb::init<std::uint32_t, std::uint32_t, bool>(), "bind_ipv4"_a, "receive_buffer_bytes"_a,
             "offload"_a)
        .def_prop_ro("descriptor", &UdpLane::descriptor)
        .def_prop_ro("port", &UdpLane::port)
        .def_prop_ro("receive_buffer_bytes", &UdpLane::receive_buffer_bytes)
        .def("mark", &UdpLane::mark, "dscp"_a)
        .def("receive_trimmed", &UdpLane::receive_trimmed)
        .def(
            "keep_ledger",  // `open_descriptor`: a file for the ops that are under way; -1: none
            [](UdpLane& lane, std::shared_ptr<LedgerFile> ledger, int open_descriptor, std::size_t open_bytes,
               const nb::bytes& head) {
                std::unique_ptr<OpenOps> open;
                if (open_descriptor >= 0) open = std::make_unique<OpenOps>(open_descriptor, open_bytes);
                const auto bytes = span_of(head);
                lane.keep_ledger(std::move(ledger), std::move(open), {bytes.begin(), bytes.end()});
            },
            "ledger"_a, "open_descriptor"_a, "open_bytes"_a, "head"_a)
        .def(
            "join_multicast",
            [](UdpLane& lane, std::uint32_t ipv4, std::uint16_t port, std::uint32_t interface_ipv4, int ttl,
               bool loop) { lane.join_multicast({ipv4, port, interface_ipv4, ttl, loop}); },
            "ipv4"_a, "port"_a, "interface_ipv4"_a, "ttl"_a, "loop"_a)
        .def("leave_multicast", &UdpLane::leave_multicast)
        .def_prop_ro("group_descriptor", &UdpLane::group_descriptor)
        .def(
            "start",
            [](UdpLane& lane, Rank rank, Rank ranks, Rank rows, std::uint64_t seed, std::uint64_t group_tag,
               Seq window_ops, int codec, bool resend, bool carry, std::size_t pool_bytes,
               std::uint32_t window_bytes, const Terms& terms, const std::vector<PeerSettings>& peers,
               const std::vector<IpAndPort>& addresses, const std::vector<std::vector<IpAndPort>>& sources,
               const std::vector<Rank>& members, const std::optional<PeerSettings>& group_path,
               bool record_fates) {
                const bool fit = std::all_of(members.begin(), members.end(),
                                             [&](Rank member) { return member < ranks && member != rank; });
                if (!fit || (!members.empty() && !group_path)) throw nb::value_error("members");
                if (rows == 0 || ranks % rows != 0 || (rows > 1 && !members.empty()))
                    throw nb::value_error("rows");
                if (addresses.size() != ranks || sources.size() != ranks) throw nb::value_error("addresses");
                Settings settings;
                settings.rows = rows;
                if (group_path) settings.multicast = {members, *group_path};
                settings.shape = {rank, ranks, seed};
                settings.group_tag = group_tag;
                settings.window_ops = window_ops;
                settings.codec = static_cast<wire::Codec>(codec);
                settings.resend = resend;
                settings.carry = carry;
                settings.record_fates = record_fates;
                settings.pool_bytes = pool_bytes;
                settings.window_bytes = window_bytes;
                settings.terms = terms;
                std::vector<std::vector<Address>> from;
                for (const auto& of_rank : sources) from.push_back(addresses_of(of_rank));
                lane.start(settings, peers, addresses_of(addresses), std::move(from));
            },
            "rank"_a, "ranks"_a, "rows"_a, "seed"_a, "group_tag"_a, "window_ops"_a, "codec"_a, "resend"_a,
            "carry"_a, "pool_bytes"_a, "window_bytes"_a, "terms"_a, "peers"_a, "addresses"_a, "sources"_a,
            "members"_a = std::vector<Rank>{}, "group_path"_a = nb::none(), "record_fates"_a = false,
            nb::call_guard<nb::gil_scoped_release>())
        .def(
            "submit",
            [](UdpLane& lane, const Bucket& bucket, Terms terms, std::uint32_t key,
               std::uint16_t loss_scale_tag, const std::vector<FirstAndCount>& reliable, bool contribute,
               std::optional<Seq> seq, const std::optional<Bucket>& residue) {
                const auto values = floats_of(bucket);
                terms.residue = residue_of(residue, bucket);
                terms.reliable = runs_of(reliable);
                terms.key = key;
                terms.loss_scale_tag = loss_scale_tag;
                terms.contribute = contribute;
                terms.seq = seq;
                const nb::gil_scoped_release release;
                return lane.submit(values, terms);
            },
            "bucket"_a, "terms"_a, "key"_a = 0, "loss_scale_tag"_a = 0,
            "reliable"_a = std::vector<FirstAndCount>{}, "contribute"_a = true, "seq"_a = nb::none(),
            "residue"_a = nb::none())
        .def(
            "wait",
            [](UdpLane& lane, Ticket ticket, Duration timeout_ns) {
                std::optional<OpReport> report(std::in_place);
                const nb::gil_scoped_release release;
                if (!lane.wait(ticket, timeout_ns, *report)) report.reset();
                return report;
            },
            "ticket"_a, "timeout_ns"_a)
        .def(
            "offer",
            [](UdpLane& lane, std::uint64_t id, const Bytes& blob) {
                const auto* const begin = reinterpret_cast<const std::byte*>(blob.data());
                const nb::gil_scoped_release release;
                lane.offer(id, std::make_shared<const std::vector<std::byte>>(begin, begin + blob.size()));
            },
            "id"_a, "blob"_a)
        .def("withdraw", &UdpLane::withdraw, "id"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("fetch", &UdpLane::fetch, "server"_a, "id"_a, "most_bytes"_a,
             nb::call_guard<nb::gil_scoped_release>())
        .def("cancel", &UdpLane::cancel, "ticket"_a, nb::call_guard<nb::gil_scoped_release>())
        .def(
            "take_fetched",
            [](UdpLane& lane, Ticket ticket, Duration timeout_ns) {
                auto fetched = std::make_unique<Fetched>();
                {
                    const nb::gil_scoped_release release;
                    *fetched = lane.take_fetched(ticket, timeout_ns);
                }
                const auto status = static_cast<int>(fetched->status);
                auto* const bytes = reinterpret_cast<std::uint8_t*>(fetched->bytes.data());
                const std::size_t count = fetched->bytes.size();
                const nb::capsule owner(fetched.release(),
                                        [](void* p) noexcept { delete static_cast<Fetched*>(p); });
                return std::pair(status, FetchedBytes(bytes, {count}, owner));
            },
            "ticket"_a, "timeout_ns"_a)
        .def("take_wanted", &UdpLane::take_wanted, nb::call_guard<nb::gil_scoped_release>())
        .def("drop_report", &UdpLane::drop_report, "ticket"_a, nb::call_guard<nb::gil_scoped_release>())
        .def_prop_ro("failure", &UdpLane::failure, nb::call_guard<nb::gil_scoped_release>())
        .def("resynced", [](UdpLane& lane) { lane.notify([](Core& core) { core.resynced(); }); })
        .def("set_away", &UdpLane::set_away, "away"_a)
        .def(
            "skip_to", [](UdpLane& lane, Seq seq) { lane.notify([=](Core& core) { core.skip_to(seq); }); },
            "seq"_a)
        .def("rejoined", [](UdpLane& lane) { lane.notify([](Core& core) { core.rejoined(); }); })
        .def(
            "skipped",
            [](UdpLane& lane, Seq first_seq, Seq last_seq) {
                lane.notify([=](Core& core) { core.skipped(first_seq, last_seq + 1); });
            },
            "first_seq"_a, "last_seq"_a)
        .def(
            "forget",
            [](UdpLane& lane, std::uint32_t key, std::uint64_t first, std::uint64_t count) {
                lane.notify([=](Core& core) { core.forget(key, first, first + count); });
            },
            "key"_a, "first"_a, "count"_a)
        .def(
            "install",
            [](UdpLane& lane, const Epoch& epoch) {
                if (epoch.members.size() != lane.ranks()) throw nb::value_error("epoch: not of this group");
                const nb::gil_scoped_release release;
                lane.install(epoch);
            },
            "epoch"_a)
        .def("close", &UdpLane::close, "linger_ns"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("join", &UdpLane::join, "timeout_ns"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("stats",
             [](const UdpLane& lane) {
                 const nb::gil_scoped_release release;
                 return lane.stats();
             })
        .def_prop_ro("behind_ops", &UdpLane::behind_ops, nb::call_guard<nb::gil_scoped_release>())
        .def_prop_ro("heard_epoch", &UdpLane::heard_epoch, nb::call_guard<nb::gil_scoped_release>())
        .def("abandon", &UdpLane::abandon);
}

// For tests, which put a bottleneck of their own around it.
void bind_pacing(nb::module_& m) {
    nb::class_<RateControl>(m, "RateControl")
        .def(nb::init<std::uint32_t, Rank>(), "packet_bytes"_a, "rivals"_a)
        .def(
            "learn",
            [](RateControl& rate, Time now_ns, Duration rtt_ns, Duration delay_ns, Duration span_ns,
               std::uint64_t delivered_bytes, std::uint64_t lost_bytes) {
                rate.learn(now_ns, {rtt_ns, delay_ns, span_ns, delivered_bytes, lost_bytes, 1.0, 1.0});
            },
            "now_ns"_a, "rtt_ns"_a, "delay_ns"_a, "span_ns"_a, "delivered_bytes"_a, "lost_bytes"_a)
        .def("push_back", &RateControl::push_back, "now_ns"_a)
        .def("limited", &RateControl::limited)
        .def_prop_ro("bytes_per_s", &RateControl::bytes_per_s)
        .def("most_in_flight", &RateControl::most_in_flight, "now_ns"_a, "deaf"_a);
}

}  // namespace

NB_MODULE(_native, m) {
    // torch keeps the objects that its hooks refer to beyond the interpreter's end; the lanes are closed by
    // then.
    nb::set_leak_warnings(false);
    bind_wire(m);
    bind_codec(m);
    bind_reports(m);
    bind_terms(m);
    bind_ledger(m);
    bind_udp(m);
    bind_pacing(m);
    bind_sim(m);
}
