// The codec's Python bindings: argument conversion and GIL release, no logic.
#include "bind_codec.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "codec/centroids.hpp"
#include "codec/dispatch.hpp"
#include "codec/message.hpp"
#include "codec/planes.hpp"
#include "codec/rotate.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace tailcut;

namespace {

using Vector = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstVector = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Datagrams = std::vector<std::optional<nb::bytes>>;
using Packets = std::vector<std::span<const std::byte>>;
using Counts = nb::typed<nb::dict, nb::str, std::size_t>;

Packets spans_of(const Datagrams& datagrams) {
    Packets spans;
    spans.reserve(datagrams.size());
    for (const auto& datagram : datagrams)
        if (datagram) spans.emplace_back(static_cast<const std::byte*>(datagram->data()), datagram->size());
    return spans;
}

Packets spans_of(const codec::Message& message) {
    Packets spans;
    spans.reserve(message.packets());
    for (std::size_t k = 0; k < message.packets(); ++k) spans.push_back(message.packet(k));
    return spans;
}

codec::MessageSpec spec_of(int codec_id, int planes, std::uint64_t seed, std::uint32_t payload_bytes,
                           std::uint32_t trim_payload_bytes) {
    return {static_cast<wire::Codec>(codec_id), planes, seed, {payload_bytes, trim_payload_bytes}};
}

}  // namespace

void bind_codec(nb::module_& m) {
    m.attr("CODEC_RAW") = static_cast<int>(wire::Codec::kRaw);
    m.attr("CODEC_PLANES") = static_cast<int>(wire::Codec::kPlanes);
    m.attr("CODEC_BLOCK") = codec::kBlock;
    m.def("codec_distortion",
          [] { return std::vector<double>(codec::kDistortion.begin(), codec::kDistortion.end()); });
    m.def("use_scalar_kernels", &codec::use_scalar_kernels, "scalar"_a);
    m.def(
        "codec_centroids",
        [](int bits) {
            std::vector<float> means(std::size_t{1} << bits);
            for (std::uint32_t prefix = 0; prefix < means.size(); ++prefix)
                means[prefix] = codec::centroids().of(prefix, bits);
            return means;
        },
        "bits"_a);
    // (begin, length) of each block of a shard
    m.def(
        "codec_blocks",
        [](std::uint32_t shard_len) {
            const codec::Blocks blocks(shard_len);
            std::vector<std::pair<std::uint32_t, std::uint32_t>> spans;
            for (std::uint64_t at = 0; at < blocks.padded(); at += spans.back().second) {
                const auto block = blocks.of(static_cast<std::uint32_t>(at));
                spans.emplace_back(block.begin, block.length);
            }
            return spans;
        },
        "shard_len"_a);
    // (Σx², Σx⁴) of one block, which is replaced by its rotation
    m.def(
        "codec_rotate",
        [](const Vector& block, std::uint64_t key) {
            const std::span<float> x(block.data(), block.size());
            const auto sums = codec::rotate(x, x, key);
            return std::pair(sums.squares, sums.fourths);
        },
        "block"_a, "key"_a);
    m.def(
        "codec_unrotate",
        [](const Vector& block, std::uint64_t key, float scale) {
            const std::span<float> x(block.data(), block.size());
            codec::unrotate(x, x, key, scale);
        },
        "block"_a, "key"_a, "scale"_a = 1.0f);
    // Rotates block after block into `out`, whose length is a multiple of the block's; for the benchmark.
    m.def(
        "codec_rotate_all",
        [](const ConstVector& x, const Vector& out) {
            const std::span<const float> from(x.data(), x.size());
            const std::span<float> to(out.data(), std::min(out.size(), x.size()));
            const nb::gil_scoped_release release;
            for (std::size_t at = 0; at + codec::kBlock <= to.size(); at += codec::kBlock)
                codec::rotate(from.subspan(at, codec::kBlock), to.subspan(at, codec::kBlock), at);
        },
        "x"_a, "out"_a);
    m.def(
        "codec_packet_granules",
        [](int codec_id, int planes, std::uint32_t payload_bytes, std::uint32_t trim_payload_bytes) {
            return spec_of(codec_id, planes, 0, payload_bytes, trim_payload_bytes).packet_granules();
        },
        "codec"_a, "planes"_a, "payload_bytes"_a, "trim_payload_bytes"_a);
    nb::class_<codec::Message>(m, "Message")
        .def(nb::init<>())
        .def(
            "encode",
            [](codec::Message& message, const ConstVector& x, int codec_id, int planes, std::uint64_t seed,
               std::uint32_t payload_bytes, std::uint32_t trim_payload_bytes) {
                const std::span<const float> values(x.data(), x.size());
                const nb::gil_scoped_release release;
                message.encode(values, spec_of(codec_id, planes, seed, payload_bytes, trim_payload_bytes));
            },
            "x"_a, "codec"_a, "planes"_a, "seed"_a, "payload_bytes"_a, "trim_payload_bytes"_a)
        .def_prop_ro("size_bytes", &codec::Message::bytes)
        .def("packets",
             [](const codec::Message& message) {
                 std::vector<nb::bytes> packets;
                 packets.reserve(message.packets());
                 for (const auto& packet : spans_of(message))
                     packets.emplace_back(packet.data(), packet.size());
                 return packets;
             })
        .def(
            "decode",
            [](const codec::Message& message, std::uint64_t seed, bool biased, const Vector& out) {
                const std::span<float> to(out.data(), out.size());
                const nb::gil_scoped_release release;
                codec::decode_message(spans_of(message), seed, biased, to);
            },
            "seed"_a, "biased"_a, "out"_a);
    // Counts packets by what became of them: "used", or the wire rule that rejected them.
    m.def(
        "codec_decode",
        [](const Datagrams& datagrams, std::uint64_t seed, bool biased, const Vector& out) {
            const auto spans = spans_of(datagrams);
            const std::span<float> to(out.data(), out.size());
            codec::DecodeCounts counts;
            {
                const nb::gil_scoped_release release;
                counts = codec::decode_message(spans, seed, biased, to);
            }
            Counts named;
            named["used"] = counts.used;
            for (std::size_t k = 0; k < wire::kRejectReasons; ++k)
                named[wire::name(static_cast<wire::Reject>(k))] = counts.rejected[k];
            return named;
        },
        "packets"_a, "seed"_a, "biased"_a, "out"_a);
}
