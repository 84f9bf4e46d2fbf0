// Hostile bytes for the codec's decoder: any datagrams, in any number, for a vector of any length.
//
// Input: 2 bytes of length, a byte of options, then datagrams, each preceded by 2 bytes of size. The first 48
// bytes of a datagram get a valid magic, version, type and length unless its size is odd, so that the fuzzer
// reaches the planes.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>
#include <vector>

#include "codec/dispatch.hpp"
#include "codec/message.hpp"

using namespace tailcut;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    if (size < 3) return 0;
    const std::uint32_t n = data[0] | data[1] << 8;
    const std::uint8_t options = data[2];
    std::vector<std::vector<std::byte>> datagrams;
    for (std::size_t at = 3; at + 2 <= size && datagrams.size() < 16;) {
        const std::size_t wanted = data[at] | (data[at + 1] & 15) << 8;
        at += 2;
        const std::size_t length = std::min(wanted, size - at);
        const auto* bytes = reinterpret_cast<const std::byte*>(data + at);
        auto& datagram = datagrams.emplace_back(bytes, bytes + length);
        at += length;
        if (length >= wire::kHeaderBytes && wanted % 2 == 0) {
            const std::uint8_t start[] = {wire::kMagic, wire::kVersion, 1};
            std::memcpy(datagram.data(), start, sizeof start);
            std::memset(datagram.data() + 14, 0, 6);  // shard, seq
            std::memcpy(datagram.data() + 20, &n, sizeof n);
        }
    }
    std::vector<std::span<const std::byte>> spans(datagrams.begin(), datagrams.end());
    std::vector<float> fast(n), slow(n);
    const auto counts = codec::decode_message(spans, options, options & 1, fast);
    std::size_t counted = counts.used;
    for (const std::size_t count : counts.rejected) counted += count;
    if (counted != spans.size()) std::abort();
    codec::use_scalar_kernels(true);
    codec::decode_message(spans, options, options & 1, slow);
    codec::use_scalar_kernels(false);
    for (std::uint32_t k = 0; k < n; ++k)  // NaNs may differ in their bits
        if (std::memcmp(&fast[k], &slow[k], sizeof(float)) != 0 &&
            !(fast[k] != fast[k] && slow[k] != slow[k]))
            std::abort();
    codec::Message again;  // whatever was decoded can be encoded
    again.encode(std::span(fast).first(std::min<std::size_t>(n, 4096)), {.planes = 1 + (options >> 1) % 16});
    return 0;
}
