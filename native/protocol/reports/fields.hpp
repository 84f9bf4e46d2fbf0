// Structs name their fields in one list. It is used to add them up, bind them to Python and make tables:
//
//     template <typename Visit>
//     static constexpr void visit_fields(Visit&& visit) {
//         visit("sent_bytes", &Traffic::sent_bytes);
//     }
#pragma once

#include <cstddef>
#include <utility>

namespace tailcut {

template <typename T>
concept Listed = requires { T::visit_fields([](const char*, auto) {}); };

template <Listed T>
constexpr T& operator+=(T& sums, const T& other) {
    T::visit_fields([&](const char*, auto field) {
        if constexpr (requires { (sums.*field).size(); })
            for (std::size_t k = 0; k < (sums.*field).size(); ++k) (sums.*field)[k] += (other.*field)[k];
        else
            sums.*field += other.*field;
    });
    return sums;
}

// Equals sizeof(T) if the struct lists all of its fields and has no padding.
template <Listed T>
consteval std::size_t listed_bytes() {
    std::size_t bytes = 0;
    T::visit_fields([&](const char*, auto field) { bytes += sizeof(std::declval<T&>().*field); });
    return bytes;
}

}  // namespace tailcut
