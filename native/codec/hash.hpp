// A 64-bit hash of values, the same on every machine of one byte order. It tells results apart; it keeps no secrets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace tailcut::codec {

std::uint64_t hash_of(std::span<const std::byte> bytes);

}  // namespace tailcut::codec
