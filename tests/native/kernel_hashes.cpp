// Hashes of what the codec's kernels compute, one line for each case:
//
//   kernel_hashes
//
// Exits with 1 if the scalar twins and the processor's vector kernels differ. Its output is the same on every
// machine, so comparing what two of them print compares their arithmetic (make test-aarch64).
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "base/types.hpp"
#include "codec/dispatch.hpp"
#include "codec/hash.hpp"
#include "codec/message.hpp"
#include "codec/raw.hpp"
#include "codec/rotate.hpp"

namespace {

using namespace tailcut;
using Bytes = std::vector<std::byte>;

void append(Bytes& to, const void* from, std::size_t size) {
    const auto* bytes = static_cast<const std::byte*>(from);
    to.insert(to.end(), bytes, bytes + size);
}

// Gaussian: about so, by sums of uniform values. Spiked: few of them are not zero. Paired: few ones, which make
// exact zeros of many rotated coordinates.
enum class Kind { kGaussian, kSpiked, kPaired };
constexpr const char* kNames[] = {"gaussian", "spiked", "paired"};

std::vector<float> vector_of(std::size_t n, std::uint64_t seed, Kind kind) {
    std::vector<float> x(n);
    for (std::size_t k = 0; k < n; ++k) {
        const std::uint64_t bits = mix(seed + k);
        float sum = 0;
        for (int part = 0; part < 4; ++part)
            sum += static_cast<float>(static_cast<std::int16_t>(bits >> (16 * part))) / 32768;
        if (kind == Kind::kGaussian) x[k] = sum;
        if (kind == Kind::kSpiked) x[k] = bits % 97 == 0 ? sum : 0.0f;
        if (kind == Kind::kPaired) x[k] = k % 5000 == 7 ? 1.0f : 0.0f;
    }
    return x;
}

bool all_alike = true;

void compare(const std::string& name, const std::function<void(Bytes&)>& run) {
    Bytes results[2];
    for (const bool scalar : {false, true}) {
        codec::use_scalar_kernels(scalar);
        run(results[scalar]);
    }
    codec::use_scalar_kernels(false);
    std::printf("%-28s %016llx\n", name.c_str(), static_cast<unsigned long long>(codec::hash_of(results[1])));
    if (results[0] == results[1]) return;
    std::fprintf(stderr, "%s: the vector kernels differ from their scalar twins\n", name.c_str());
    all_alike = false;
}

void rotations() {
    for (std::size_t n = 64; n <= codec::kMaxRotation; n *= 2)
        compare("rotate " + std::to_string(n), [n](Bytes& result) {
            std::vector<float> x = vector_of(n, n, Kind::kGaussian), z(n);
            const codec::PowerSums sums = codec::rotate(x, z, n);
            append(result, &sums, sizeof sums);
            append(result, z.data(), 4 * n);
            codec::unrotate(z, x, n, 0.7f);
            append(result, x.data(), 4 * n);
        });
}

// Whole messages: scales, gains, planes and headers, and what is decoded from packets that are whole or cut.
void messages(Kind kind) {
    for (int planes = 1; planes <= 16; ++planes)
        compare(kNames[static_cast<int>(kind)] + (", planes " + std::to_string(planes)), [=](Bytes& result) {
            const std::vector<float> x = vector_of(10'000, static_cast<std::uint64_t>(planes), kind);
            codec::Message message;
            message.encode(x, {.planes = planes, .seed = 5});
            for (const bool biased : {false, true})
                for (const bool cut : {false, true}) {
                    std::vector<std::span<const std::byte>> packets;
                    for (std::size_t k = 0; k < message.packets(); ++k) {
                        const auto packet = message.packet(k);
                        append(result, packet.data(), packet.size());
                        packets.push_back(cut ? packet.first(packet.size() - mix(k) % packet.size())
                                              : packet);
                    }
                    std::vector<float> out(x.size());
                    codec::decode_message(packets, 5, biased, out);
                    append(result, out.data(), 4 * out.size());
                }
        });
}

// The mean of the raw codec is compiled for the processor's registers from one source.
void means() {
    for (const float divisor : {3.0f, 4.0f})
        compare("mean over " + std::to_string(static_cast<int>(divisor)), [divisor](Bytes& result) {
            std::vector<std::vector<float>> vectors;
            std::vector<const float*> sources;
            for (std::uint64_t rank = 0; rank < static_cast<std::uint64_t>(divisor); ++rank)
                vectors.push_back(vector_of(1001, rank, Kind::kGaussian));
            for (const auto& vector : vectors) sources.push_back(vector.data());
            std::vector<float> out(1001);
            codec::mean_in_order(sources, divisor, out.size(), out.data());
            append(result, out.data(), 4 * out.size());
        });
}

}  // namespace

int main() {
    rotations();
    for (const Kind kind : {Kind::kGaussian, Kind::kSpiked, Kind::kPaired}) messages(kind);
    means();
    return all_alike ? 0 : 1;
}
