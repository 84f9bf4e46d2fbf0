// Where a packet goes: to one rank, or to everybody who hears our multicast.
#pragma once

#include <cstddef>

#include "base/types.hpp"

namespace tailcut {

class Destination {
public:
    constexpr Destination(Rank rank = 0) : rank_(rank) {}
    static constexpr Destination everybody() {
        Destination all;
        all.everybody_ = true;
        return all;
    }

    constexpr bool is_everybody() const { return everybody_; }
    constexpr Rank rank() const { return rank_; }  // not for everybody
    // Its index in tables that are kept by rank, with one entry for everybody behind them.
    constexpr std::size_t place(std::size_t ranks) const { return everybody_ ? ranks : rank_; }
    friend constexpr bool operator==(const Destination&, const Destination&) = default;
    friend constexpr auto operator<=>(const Destination&, const Destination&) = default;

private:
    Rank rank_ = 0;
    bool everybody_ = false;
};

}  // namespace tailcut
