// What has come from one source, for the FEEDBACK that tells it: the latest datagram, and the numbers that are missing.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "protocol/types.hpp"
#include "wire/header.hpp"

namespace tailcut {

// Serial-number order (RFC 1982) of wrapping stamps and numbers.
constexpr bool after(std::uint32_t a, std::uint32_t b) { return static_cast<std::int32_t>(a - b) > 0; }
constexpr int distance(std::uint16_t from, std::uint16_t to) {
    return static_cast<std::int16_t>(static_cast<std::uint16_t>(to - from));
}

inline std::uint32_t clock_us(Time now) { return static_cast<std::uint32_t>(now / kMicrosecond); }

class Arrivals {
public:
    Arrivals() { came_.fill(~std::uint64_t{0}); }  // what was never sent is not missing

    // A datagram. DATA has its own number; FEEDBACK and GOODBYE state that of the last DATA before them.
    void note(Time now, const wire::Header& header) {
        const bool data = header.type == wire::Type::kData;
        const std::uint32_t delay_us = clock_us(now) - header.stamp_us;
        if (stamp_us_ == 0 || after(header.stamp_us, stamp_us_)) {
            stamp_us_ = header.stamp_us;
            arrival_us_ = clock_us(now);
        }
        if (!delay_known_ || after(least_delay_us_, delay_us)) least_delay_us_ = delay_us;
        delay_known_ = true;
        const int ahead = distance(latest_, header.number);
        for (int k = 1; k <= std::min(ahead, kNumbers); ++k)
            mark(static_cast<std::uint16_t>(latest_ + k), false);
        missing_ += static_cast<std::uint64_t>(std::max(0, ahead));
        if (ahead > 0) latest_ = header.number;
        if (!data) return;
        ++came_count_;
        if (ahead <= -kNumbers || test(header.number)) return;
        mark(header.number, true);
        --missing_;
    }
    // DATA so far: what came, and what was sent before something that came and did not.
    std::uint64_t came() const { return came_count_; }
    std::uint64_t missing() const { return missing_; }
    // There was no room for it: as if it had not come.
    void refuse(std::uint16_t number) {
        if (distance(latest_, number) <= -kNumbers || !test(number)) return;
        mark(number, false);
        ++missing_;
    }
    // Bytes since the last FEEDBACK, as the source charges them.
    std::uint32_t count(std::uint32_t cost) { return unreported_ += cost; }

    // Whether number `latest` - k has come, by what a FEEDBACK says.
    static bool reported(std::span<const std::byte> missing, int k) {
        const auto byte = static_cast<std::size_t>(k / 8);
        return byte >= missing.size() || (missing[byte] & std::byte{1} << (k % 8)) != std::byte{0};
    }

    using Missing = std::array<std::byte, wire::kReportNumbers / 8>;
    // Fills in the header of a FEEDBACK; returns the bytes of its payload.
    std::size_t report(wire::Header& header, Missing& payload) {
        header.echo_us = stamp_us_;
        header.arrival_us = arrival_us_;
        header.delay_us = least_delay_us_;
        header.latest = latest_;
        unreported_ = 0;
        delay_known_ = false;
        payload.fill(std::byte{0});
        int oldest = -1;
        for (int k = 0; k < kNumbers; ++k)
            if (test(static_cast<std::uint16_t>(latest_ - k)))
                payload[static_cast<std::size_t>(k / 8)] |= std::byte{1} << (k % 8);
            else
                oldest = k;
        return static_cast<std::size_t>(oldest / 8 + (oldest >= 0));
    }

private:
    static constexpr int kNumbers = wire::kReportNumbers;
    void mark(std::uint16_t number, bool came) {
        const std::uint64_t bit = std::uint64_t{1} << (number % 64);
        auto& word = came_[number / 64 % came_.size()];
        word = came ? word | bit : word & ~bit;
    }
    bool test(std::uint16_t number) const { return came_[number / 64 % came_.size()] >> (number % 64) & 1; }

    std::array<std::uint64_t, kNumbers / 64> came_;  // by number modulo kNumbers
    std::uint16_t latest_ = 0;
    std::uint32_t stamp_us_ = 0, arrival_us_ = 0;
    std::uint32_t least_delay_us_ = 0;
    bool delay_known_ = false;
    std::uint32_t unreported_ = 0;
    std::uint64_t came_count_ = 0, missing_ = 0;
};

}  // namespace tailcut
