// One direction of a link. It carries one packet after another, at a rate that may change at given times. One that is
// a token bucket carries some bytes at once after a pause, and then keeps to its rate.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "base/types.hpp"

namespace tailcut::sim {

class Link {
public:
    explicit Link(double bytes_per_s = 0, std::uint64_t bucket_bytes = 0)
        : nominal_(bytes_per_s), steps_{{0, bytes_per_s}} {
        if (bytes_per_s > 0)
            bucket_ = static_cast<Duration>(static_cast<double>(bucket_bytes) / bytes_per_s * 1e9);
    }

    // From `at` on, the rate is `factor` times the nominal one. Must be called in the order of time.
    void change(Time at, double factor) { steps_.push_back({at, nominal_ * factor}); }

    bool unlimited() const { return nominal_ <= 0; }
    Time free_at() const { return free_; }

    // When a packet that comes now will have been carried.
    Time carry(Time now, std::uint64_t bytes) {
        if (unlimited()) return now;
        seek(now);
        free_ = after(std::max(now - bucket_, free_), static_cast<double>(bytes));
        return std::max(now, free_);
    }

    // Bytes that wait or are being carried.
    double backlog_bytes(Time now) {
        if (free_ <= now) return 0;
        seek(now);
        double bytes = 0;
        for (std::size_t k = step_; now < free_; ++k) {
            const Time until = std::min(end(k), free_);
            bytes += static_cast<double>(until - now) * 1e-9 * steps_[k].bytes_per_s;
            now = until;
        }
        return bytes;
    }

private:
    struct Step {
        Time from;
        double bytes_per_s;
    };
    Time end(std::size_t step) const { return step + 1 < steps_.size() ? steps_[step + 1].from : kNever; }
    void seek(Time now) {
        while (end(step_) <= now) ++step_;  // time never goes back
    }
    Time after(Time start, double bytes) const {
        std::size_t k = step_;
        while (end(k) <= start) ++k;
        for (;; ++k) {
            const double takes_ns = bytes / steps_[k].bytes_per_s * 1e9;
            if (end(k) == kNever || static_cast<double>(end(k) - start) >= takes_ns)
                return start + static_cast<Duration>(std::llround(takes_ns));
            bytes -= static_cast<double>(end(k) - start) * 1e-9 * steps_[k].bytes_per_s;
            start = end(k);
        }
    }

    double nominal_;
    std::vector<Step> steps_;
    std::size_t step_ = 0;  // the step of the last call
    Duration bucket_ = 0;   // a full bucket, in time
    Time free_ = 0;         // when all that it was given is carried at its rate; in the past: tokens
};

}  // namespace tailcut::sim
