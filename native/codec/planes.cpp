#include "codec/planes.hpp"

#include <algorithm>
#include <cstring>

#include "codec/dispatch.hpp"
#include "codec/planes_kernels.hpp"

namespace tailcut::codec {
namespace {

// Separates the tie bits from the signs, which have the same key.
constexpr std::uint64_t kTies = 0x7469657300000000;

std::uint16_t deviation_at(const PlanesHead& head, std::span<const std::byte> payload, int bits) {
    if (bits == 1) return head.gain_one;
    if (bits == head.planes) return head.gain_full;
    std::uint16_t deviation = 0;
    if (2 * static_cast<std::size_t>(bits - 1) <= head.gain_bytes())
        std::memcpy(&deviation, payload.data() + head.stride() + 2 * static_cast<std::size_t>(bits - 2), 2);
    return deviation;
}

float weight(const PlanesHead& head, std::span<const std::byte> payload, int bits) {
    if (bits == 0) return 0;
    const std::uint16_t deviation = deviation_at(head, payload, bits);
    const auto nominal = static_cast<float>(1 - kDistortion[static_cast<std::size_t>(bits)]);
    if (deviation == 0 || !is_finite_half(deviation)) return nominal;
    return nominal * std::clamp(1.0f + from_half(deviation), 1.0f / 64, 4096.0f);
}

void decode_run(const DecodeRun& run) {
    if (run.first == run.last) return;
    if (run.bits == 0) {
        if (!run.add) std::fill(run.out + 64 * run.first, run.out + 64 * run.last, 0.0f);
        return;
    }
#if defined(TAILCUT_VECTOR_KERNELS)
    if (use_vector_kernels()) return decode_vector(run, centroids());
#endif
    decode_scalar(run, centroids());
}

Cut decode_to(const PlanesHead& head, std::span<const std::byte> payload, float* out, bool add) {
    const Cut cut = cut_of(head, payload);
    const std::byte* first = payload.data();
    const PlaneBytes<const std::byte> from{first, first + head.stride() + head.gain_bytes(), head.stride()};
    decode_run({from, 0, cut.longer, cut.bits + 1, head.sigma, out, add});
    decode_run({from, cut.longer, head.granules, cut.bits, head.sigma, out, add});
    return cut;
}

}  // namespace

void quantize8(const float* z, float unit, std::uint32_t* codes) {
#if defined(TAILCUT_VECTOR_KERNELS)
    if (use_vector_kernels()) return quantize8_vector(z, unit, codes);
#endif
    for (std::size_t k = 0; k < 8; ++k) codes[k] = quantize(z[k] * unit);
}

void encode_scalar(const EncodeRun& run) {
    for (std::size_t g = 0; g < run.granules; ++g) {
        std::uint64_t words[kMaxPlanes] = {}, zeros = 0;
        for (std::size_t k = 0; k < 64; ++k) {
            const float z = run.z[64 * g + k];
            const std::uint64_t q = quantize(z * run.unit);
            for (int p = 0; p < run.planes; ++p) words[p] |= (q >> (kMaxPlanes - 1 - p) & 1) << k;
            zeros |= std::uint64_t{z == 0} << k;
        }
        // Zeros with a tie bit get the code just below that of zero: all of its bits are inverted.
        const std::uint64_t tied = zeros ? zeros & mix(run.tie_key + g) : 0;
        for (int p = 0; p < run.planes; ++p) {
            words[p] ^= tied;
            std::memcpy(run.to.word(static_cast<std::size_t>(p), g), &words[p], 8);
        }
    }
}

void decode_scalar(const DecodeRun& run, const Centroids& means) {
    for (std::size_t g = run.first; g < run.last; ++g) {
        std::uint64_t words[kMaxPlanes];
        for (int p = 0; p < run.bits; ++p)
            std::memcpy(&words[p], run.from.word(static_cast<std::size_t>(p), g), 8);
        for (std::size_t k = 0; k < 64; ++k) {
            std::uint32_t prefix = 0;
            for (int p = 0; p < run.bits; ++p) prefix = 2 * prefix | (words[p] >> k & 1);
            const float value = means.of(prefix, run.bits) * run.sigma;
            float& out = run.out[64 * g + k];
            out = run.add ? out + value : value;
        }
    }
}

PlanesHead head_of(const wire::Header& header) {
    return {(header.count + kGranule - 1) / kGranule, header.planes, header.scale, header.gain_one,
            header.gain_full};
}

void put_run(const PlanesHead& head, std::uint32_t first, std::uint32_t shard_len, wire::Header& header) {
    header.codec = wire::Codec::kPlanes;
    header.planes = static_cast<std::uint8_t>(head.planes);
    header.scale = head.sigma;
    header.gain_one = head.gain_one;
    header.gain_full = head.gain_full;
    header.first = first * kGranule;
    header.count = static_cast<std::uint16_t>(std::min(head.granules * kGranule, shard_len - header.first));
}

PlanesHead head_of(std::uint32_t granules, int planes, const Scale& scale, const Gains& gains) {
    return {granules, planes, scale.sigma, gains.at(1), gains.at(planes)};
}

void encode(std::span<const float> z, const PlanesHead& head, const Scale& scale, const Gains& gains,
            std::uint64_t key, std::uint32_t first_granule, std::span<std::byte> payload) {
    if (scale.non_finite || scale.unit == 0) {
        std::fill_n(payload.begin(), head.payload_bytes(), std::byte{0});
        return;
    }
    std::byte* table = payload.data() + head.stride();
    std::memcpy(table, gains.deviation.data() + 2, head.gain_bytes());
    const EncodeRun run{z.data(),
                        head.granules,
                        scale.unit,
                        head.planes,
                        (key ^ kTies) + first_granule,
                        {payload.data(), table + head.gain_bytes(), head.stride()}};
#if defined(TAILCUT_VECTOR_KERNELS)
    if (use_vector_kernels()) return encode_vector(run);
#endif
    encode_scalar(run);
}

Cut cut_of(const PlanesHead& head, std::span<const std::byte> payload) {
    const std::size_t stride = head.stride(), got = std::min(payload.size(), head.payload_bytes());
    Cut cut;
    if (stride == 0) return cut;
    if (got < stride + head.gain_bytes()) {
        cut.bits = got < stride ? 0 : 1;
        cut.longer = got < stride ? static_cast<std::uint32_t>(got / 8) : 0;
    } else {
        const std::size_t rest = got - head.gain_bytes();
        cut.bits = static_cast<int>(rest / stride);
        cut.longer = static_cast<std::uint32_t>(rest % stride / 8);
    }
    if (cut.longer > 0) cut.longer_weight = weight(head, payload, cut.bits + 1);
    cut.weight = weight(head, payload, cut.bits);
    return cut;
}

float stated_weight(const PlanesHead& head) { return weight(head, {}, head.planes); }

Cut decode(const PlanesHead& head, std::span<const std::byte> payload, std::span<float> out) {
    return decode_to(head, payload, out.data(), false);
}

Cut accumulate(const PlanesHead& head, std::span<const std::byte> payload, std::span<float> sums,
               std::span<float> weights, float count) {
    PlanesHead counted = head;
    counted.sigma *= count;
    const Cut cut = decode_to(counted, payload, sums.data(), true);
    for (std::uint32_t g = 0; g < head.granules; ++g) weights[g] += count * cut.weight_of(g);
    return cut;
}

PlanesHead slice(const PlanesHead& head, std::span<const std::byte> payload, std::uint32_t first,
                 std::uint32_t granules, int planes, std::byte* out) {
    const PlanesHead part{granules, planes, head.sigma, head.gain_one, deviation_at(head, payload, planes)};
    for (int p = 0; p < planes; ++p) {
        const std::size_t plane =
            static_cast<std::size_t>(p) * head.stride() + (p > 0 ? head.gain_bytes() : 0);
        out = std::copy_n(payload.data() + plane + std::size_t{first} * 8, part.stride(), out);
        if (p == 0 && part.gain_bytes() > 0)
            out = std::copy_n(payload.data() + head.stride(), part.gain_bytes(), out);
    }
    return part;
}

}  // namespace tailcut::codec
