// How much came from each source recently, relative to the mean over those that sent anything.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/types.hpp"

namespace tailcut {

class Shares {
public:
    explicit Shares(Rank ranks) : bytes_(ranks), shares_(ranks) {}

    void count(Time now, Rank source, std::size_t bytes) {
        largest_ = std::max(largest_, bytes);
        if (now - since_ >= kPeriod && total_ >= active_ * kLeastPackets * largest_ && total_ > 0) turn(now);
        active_ += bytes_[source] == 0;
        bytes_[source] += static_cast<std::uint32_t>(bytes);
        total_ += bytes;
    }
    // In 1/256 of the mean; 0: unknown.
    std::uint16_t of(Rank source) const { return shares_[source]; }

private:
    // Long enough, in time and in packets of each source, that a burst does not look like a share.
    static constexpr Duration kPeriod = 4 * kMillisecond;
    static constexpr std::uint64_t kLeastPackets = 8;
    void turn(Time now) {
        const double mean = static_cast<double>(total_) / static_cast<double>(active_);
        for (std::size_t rank = 0; rank < bytes_.size(); ++rank) {
            shares_[rank] = static_cast<std::uint16_t>(std::min(65535.0, 256 * bytes_[rank] / mean));
            bytes_[rank] = 0;
        }
        total_ = active_ = 0;
        since_ = now;
    }

    std::vector<std::uint32_t> bytes_;   // by source, in the current period
    std::vector<std::uint16_t> shares_;  // by source, in the last period
    std::uint64_t total_ = 0, active_ = 0;
    std::size_t largest_ = 0;  // the largest datagram
    Time since_ = 0;
};

}  // namespace tailcut
