// CUBIC congestion control (RFC 9438) as Linux runs it: slow start with HyStart's exit on rising delay, the
// cubic curve and the Reno-friendly region. Windows are in segments. It has no clock: it is told the time.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/types.hpp"

namespace tailcut::sim {

class Cubic {
public:
    explicit Cubic(double initial_window) : window_(initial_window) {}

    double window() const { return window_; }
    bool slow_start() const { return window_ < threshold_; }

    // Segments were acknowledged while the window limited the sender.
    void acked(double segments, Time now, Duration srtt) {
        if (slow_start()) {
            window_ += segments;
            return;
        }
        if (epoch_ == kNever) begin_epoch(now);
        const double t = seconds(now - epoch_ + srtt);
        const double target = kC * std::pow(t - k_, 3) + origin_;
        reno_ += kRenoGrowth * segments / window_;
        const double wanted = std::clamp(std::max(target, reno_), window_, 1.5 * window_);
        window_ += (wanted - window_) / window_ * segments;
    }

    // A round trip was measured. Slow start ends when the queue begins to build up. Linux takes as threshold
    // an eighth of the least round trip, between 4 and 16 ms.
    void measured(Duration rtt, bool round_ended) {
        least_rtt_ = std::min(least_rtt_, rtt);
        if (round_ended) round_least_ = kNever, samples_ = 0;
        round_least_ = std::min(round_least_, rtt);
        const Duration margin = std::clamp(least_rtt_ / 8, 4 * kMillisecond, 16 * kMillisecond);
        if (++samples_ >= kSamples && slow_start() && window_ >= kLowWindow &&
            round_least_ >= least_rtt_ + margin)
            threshold_ = window_;
    }

    // A loss was found, the first one of its round trip.
    void lost() {
        origin_ = window_ < origin_ ? window_ * (1 + kBeta) / 2 : window_;  // fast convergence
        window_ = threshold_ = std::max(2.0, window_ * kBeta);
        epoch_ = kNever;
    }
    void timed_out() {
        lost();
        window_ = 1;
    }

private:
    static constexpr double kC = 0.4, kBeta = 0.7;
    static constexpr double kRenoGrowth = 3 * (1 - kBeta) / (1 + kBeta);
    static constexpr double kLowWindow = 16;
    static constexpr int kSamples = 8;
    static double seconds(Duration ns) { return static_cast<double>(ns) * 1e-9; }

    void begin_epoch(Time now) {
        epoch_ = now;
        origin_ = std::max(origin_, window_);
        k_ = std::cbrt((origin_ - window_) / kC);
        reno_ = window_;
    }

    double window_;
    double threshold_ = std::numeric_limits<double>::infinity();
    double origin_ = 0, k_ = 0, reno_ = 0;
    Time epoch_ = kNever;
    Duration least_rtt_ = kNever, round_least_ = kNever;
    int samples_ = 0;
};

}  // namespace tailcut::sim
