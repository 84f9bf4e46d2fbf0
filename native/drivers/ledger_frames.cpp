#include "drivers/ledger_frames.hpp"

#include <array>

namespace tailcut {
namespace {

constexpr std::array<std::uint32_t, 256> kCrcTable = [] {
    std::array<std::uint32_t, 256> table{};
    for (std::uint32_t k = 0; k < table.size(); ++k) {
        std::uint32_t value = k;
        for (int bit = 0; bit < 8; ++bit) value = value >> 1 ^ (value & 1 ? 0xEDB88320u : 0u);
        table[k] = value;
    }
    return table;
}();

std::uint32_t crc32(std::span<const std::byte> bytes) {
    std::uint32_t crc = 0xFFFFFFFF;
    for (const std::byte byte : bytes)
        crc = crc >> 8 ^ kCrcTable[(crc ^ std::to_integer<std::uint32_t>(byte)) & 0xFF];
    return ~crc;
}

void put_number(std::vector<std::byte>& to, std::uint64_t value) {
    for (; value >= 0x80; value >>= 7) to.push_back(std::byte(value | 0x80));
    to.push_back(std::byte(value));
}

}  // namespace

void put_frame(std::vector<std::byte>& to, std::uint64_t number, LedgerKind kind,
               std::span<const std::byte> payload) {
    const std::size_t at = to.size();
    to.insert(to.end(), {std::byte{0xC7}, std::byte{0x1E}, {}, {}, {}, {}});
    to.push_back(std::byte(kind));
    put_number(to, number);
    put_number(to, payload.size());
    to.insert(to.end(), payload.begin(), payload.end());
    const std::uint32_t crc = crc32(std::span(to).subspan(at + 6));
    for (int k = 0; k < 4; ++k) to[at + 2 + static_cast<std::size_t>(k)] = std::byte(crc >> (8 * k));
}

}  // namespace tailcut
