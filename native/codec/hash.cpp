#include "codec/hash.hpp"

#include <array>
#include <cstring>

#include "base/types.hpp"

namespace tailcut::codec {

// Eight lanes of eight bytes, so that multiplications overlap.
std::uint64_t hash_of(std::span<const std::byte> bytes) {
    constexpr std::uint64_t kPrime = 0x9E3779B97F4A7C15;
    using Words = std::array<std::uint64_t, 8>;
    Words lanes{1, 2, 3, 4, 5, 6, 7, 8};
    const auto add = [&](const Words& words) {
        for (std::size_t k = 0; k < lanes.size(); ++k) {
            lanes[k] = (lanes[k] ^ words[k]) * kPrime;
            lanes[k] ^= lanes[k] >> 29;
        }
    };
    Words words;
    for (; bytes.size() >= sizeof(words); bytes = bytes.subspan(sizeof(words))) {
        std::memcpy(words.data(), bytes.data(), sizeof(words));
        add(words);
    }
    words.fill(bytes.size());  // a shorter rest is not one that ends with zeros
    if (!bytes.empty()) std::memcpy(words.data(), bytes.data(), bytes.size());
    add(words);
    std::uint64_t hash = 0;
    for (const std::uint64_t lane : lanes) hash = mix(hash ^ lane);
    return hash;
}

}  // namespace tailcut::codec
