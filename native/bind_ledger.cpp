// The Python bindings of the ledger's file and of a replay, without logic.
#include "bind_ledger.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind_bucket.hpp"
#include "drivers/ledger_file.hpp"
#include "protocol/replay/replay_core.hpp"
#include "protocol/reports/record.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace tailcut;

namespace {

std::span<const std::byte> span_of(const nb::bytes& bytes) {
    return {static_cast<const std::byte*>(bytes.data()), bytes.size()};
}

nb::bytes bytes_of(const ReplayCore::Bytes& bytes) { return nb::bytes(bytes.data(), bytes.size()); }

void bind_file(nb::module_& m) {
    nb::class_<LedgerFile>(m, "LedgerFile")
        .def(nb::init<int, std::size_t>(), "descriptor"_a, "most_waiting_bytes"_a)
        .def(
            "append",
            [](LedgerFile& file, int kind, const nb::bytes& payload) {
                file.append(static_cast<LedgerKind>(kind), span_of(payload));
            },
            "kind"_a, "payload"_a)
        .def(
            "append_op",
            [](LedgerFile& file, const nb::bytes& head, const OpReport& report) {
                file.append(LedgerKind::kOp, span_of(head), record_of(report));
            },
            "head"_a, "report"_a)
        .def_prop_ro("waiting_records",
                     [](const LedgerFile& file) { return file.progress().waiting_records; })
        .def_prop_ro("left_out", [](const LedgerFile& file) { return file.progress().left_out; })
        .def_prop_ro("problem", [](const LedgerFile& file) { return file.progress().problem; })
        .def("close", &LedgerFile::close, "limit_ns"_a, nb::call_guard<nb::gil_scoped_release>());
}

void bind_replay(nb::module_& m) {
    m.def(
        "stripe_edges",  // granules at which the stripes of a shard begin, and its end
        [](std::uint32_t shard_len) {
            const codec::SendOrder order(shard_len, 1);
            std::vector<std::uint32_t> edges;
            for (std::uint32_t k = 0; k <= order.stripes(); ++k) edges.push_back(order.first_granule(k));
            return edges;
        },
        "shard_len"_a);
    nb::class_<ReplayCore>(m, "ReplayCore")
        .def(
            "__init__",
            [](ReplayCore* self, Rank rank, Rank ranks, std::uint64_t seed, int codec,
               const std::vector<std::pair<std::uint32_t, std::uint32_t>>& limits, bool carry, Seq late_ops) {
                std::vector<codec::PacketLimits> by_rank;
                for (const auto& [payload, trimmed] : limits) by_rank.push_back({payload, trimmed});
                if (rank >= ranks || by_rank.size() != ranks) throw nb::value_error("limits");
                new (self) ReplayCore({rank, ranks, seed}, static_cast<wire::Codec>(codec),
                                      std::move(by_rank), carry, late_ops);
            },
            "rank"_a, "ranks"_a, "seed"_a, "codec"_a, "limits"_a, "carry"_a, "late_ops"_a)
        .def("install", &ReplayCore::install, "epoch"_a)
        .def("skipped", &ReplayCore::skipped, "from_seq"_a, "until_seq"_a)
        .def("resynced", &ReplayCore::resynced)
        .def(
            "take_late",
            [](ReplayCore& core, const nb::bytes& blob, const ReplayCore::Runs& runs,
               const ReplayCore::Cuts& cuts) { core.take_late(span_of(blob), runs, cuts); },
            "contribution"_a, "runs"_a, "cuts"_a)
        .def("admit", &ReplayCore::admit, "user"_a, "seq"_a, "rank"_a, "subtracted"_a, "runs"_a)
        .def(
            "take_late_means",
            [](ReplayCore& core, const nb::bytes& blob, const ReplayCore::Runs& runs) {
                core.take_late_means(span_of(blob), runs);
            },
            "mean"_a, "runs"_a)
        .def(
            "begin",
            [](ReplayCore& core, Seq seq, std::uint32_t length, std::uint32_t key,
               std::pair<int, bool> scatter, std::pair<int, bool> gather, std::uint16_t loss_scale_tag) {
                Terms terms;
                terms.key = key;
                terms.scatter = {scatter.first, scatter.second};  // planes, whole
                terms.gather = {gather.first, gather.second};
                terms.loss_scale_tag = loss_scale_tag;
                core.begin(seq, length, terms);
            },
            "seq"_a, "length"_a, "key"_a, "scatter"_a, "gather"_a, "loss_scale_tag"_a)
        .def("close_part", &ReplayCore::close_part, "seq"_a, "runs"_a)
        .def(
            "enter",
            [](ReplayCore& core, Seq seq, const Bucket& bucket, bool contributing,
               const std::optional<Bucket>& residue) {
                core.enter(seq, floats_of(bucket), contributing, residue_of(residue, bucket));
            },
            "seq"_a, "bucket"_a, "contributing"_a, "residue"_a = nb::none())
        .def(
            "contribution",
            [](ReplayCore& core, Seq seq, Rank peer) { return bytes_of(core.contribution(seq, peer)); },
            "seq"_a, "peer"_a)
        .def(
            "deliver",
            [](ReplayCore& core, Seq seq, const nb::bytes& blob, const ReplayCore::Runs& runs,
               const ReplayCore::Cuts& cuts) { core.deliver(seq, span_of(blob), runs, cuts); },
            "seq"_a, "contribution"_a, "runs"_a, "cuts"_a)
        .def("close", &ReplayCore::close, "seq"_a)
        .def(
            "mean", [](ReplayCore& core, Seq seq, Rank peer) { return bytes_of(core.mean(seq, peer)); },
            "seq"_a, "peer"_a)
        .def(
            "place",
            [](ReplayCore& core, Seq seq, const nb::bytes& blob, const ReplayCore::Runs& runs,
               const ReplayCore::Cuts& cuts) { core.place(seq, span_of(blob), runs, cuts); },
            "seq"_a, "mean"_a, "runs"_a, "cuts"_a)
        .def("place_empty", &ReplayCore::place_empty, "seq"_a, "shard"_a, "runs"_a)
        .def(
            "end",  // returns the hash of the own shard's result
            [](ReplayCore& core, Seq seq, bool complete, const std::vector<float>& shares) {
                return core.end(seq, complete ? Status::kComplete : Status::kPartial, shares).mean_hash;
            },
            "seq"_a, "complete"_a, "shares"_a)
        .def("drop", &ReplayCore::drop, "seq"_a);
}

}  // namespace

void bind_ledger(nb::module_& m) {
    bind_file(m);
    bind_replay(m);
}
