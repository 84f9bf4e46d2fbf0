// What has come from one source, for the FEEDBACK to that source: the latest datagram, and the numbers that
// are missing.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "base/types.hpp"
#include "wire/header.hpp"

namespace tailcut {

// Serial-number order (RFC 1982) of wrapping stamps and numbers.
constexpr std::int32_t distance(std::uint32_t from, std::uint32_t to) {
    return static_cast<std::int32_t>(to - from);
}
constexpr bool after(std::uint32_t a, std::uint32_t b) { return distance(b, a) > 0; }

inline std::uint32_t clock_us(Time now) { return static_cast<std::uint32_t>(now / kMicrosecond); }

class Arrivals {
public:
    // How much longer a datagram takes than the fastest of the last seconds: the time that it has waited in queues. Each
    // rank has a clock of its own, so only differences count.
    Duration queued(Time now, const wire::Header& header) const {
        if (fastest_since_ < 0) return 0;
        const std::uint32_t usual_us = after(fastest_us_, before_us_) ? before_us_ : fastest_us_;
        return std::max<Duration>(0, distance(usual_us, clock_us(now) - header.stamp_us)) * kMicrosecond;
    }

    // A datagram has come. DATA has its own number; FEEDBACK and GOODBYE state that of the last DATA before
    // them.
    void note(Time now, const wire::Header& header) {
        const std::uint32_t delay_us = clock_us(now) - header.stamp_us;
        if (stamp_us_ == 0 || after(header.stamp_us, stamp_us_)) {
            stamp_us_ = header.stamp_us;
            arrival_us_ = clock_us(now);
        }
        if (!delay_known_ || after(least_delay_us_, delay_us)) least_delay_us_ = delay_us;
        delay_known_ = true;
        note_fastest(now, delay_us);
        if (const int ahead = distance(latest_, header.number); ahead > 0) expect(ahead);
        if (header.type != wire::Type::kData) return;
        ++came_count_;
        if (!remembered(header.number) || test(header.number)) return;
        mark(header.number, true);
        --missing_;
    }
    // DATA so far: how many packets came, and how many did not although a later one did.
    std::uint64_t came() const { return came_count_; }
    std::uint64_t missing() const { return missing_; }
    // There was no room for the packet: it counts as missing.
    void refuse(std::uint32_t number) {
        if (!remembered(number) || !test(number)) return;
        mark(number, false);
        ++missing_;
    }
    // Bytes since the last FEEDBACK, as the source charges them.
    std::uint32_t count(std::uint32_t cost) { return unreported_ += cost; }

    // A mean has come trimmed: it is used, and wanted whole later.
    void note_cut(std::uint32_t number) {
        if (remembered(number)) cut_[number / 64 % cut_.size()] |= bit(number);
    }

    // Fills in the header of a FEEDBACK, and returns its payload.
    std::vector<std::uint64_t> report(wire::Header& header) {
        header.echo_us = stamp_us_;
        header.arrival_us = arrival_us_;
        header.delay_us = least_delay_us_;
        header.latest = latest_;
        unreported_ = 0;
        delay_known_ = false;
        const std::uint32_t last = latest_ / 64;
        std::size_t words = 0, cuts = 0;
        for (std::size_t back = 0; back < std::min(came_.size(), wire::kReportWords); ++back) {
            if (~came_word(last, back) != 0) words = back + 1;
            if (cut_[(last - back) % cut_.size()] != 0) words = cuts = back + 1;
        }
        std::vector<std::uint64_t> payload;
        for (std::size_t back = words; back-- > 0;) payload.push_back(came_word(last, back));
        if (cuts > 0) {
            header.flags |= wire::kCutsListed;
            for (std::size_t back = words; back-- > 0;) payload.push_back(cut_[(last - back) % cut_.size()]);
        }
        header.report_words = static_cast<std::uint16_t>(payload.size());
        return payload;
    }
    // What the payload of a FEEDBACK says of a number up to `latest`.
    struct Fate {
        bool came, cut;
    };
    static Fate fate(const wire::Header& feedback, std::span<const std::byte> payload, std::uint32_t number) {
        const bool listed = feedback.flags & wire::kCutsListed;
        const std::uint32_t back = feedback.latest / 64 - number / 64;
        const std::size_t words = payload.size() / sizeof(std::uint64_t) / (listed ? 2 : 1);
        if (back >= words) return {true, false};
        const auto test = [&](std::size_t word) {
            std::uint64_t bits;
            std::memcpy(&bits, payload.data() + word * sizeof bits, sizeof bits);
            return (bits >> number % 64 & 1) != 0;
        };
        return {test(words - 1 - back), listed && test(2 * words - 1 - back)};
    }

private:
    // Clocks drift apart, and paths change: a delay is remembered for one such time, two at most.
    static constexpr Duration kRemembered = 10 * 1000 * kMillisecond;

    void note_fastest(Time now, std::uint32_t delay_us) {
        if (fastest_since_ < 0 || now - fastest_since_ >= kRemembered) {
            const bool old = fastest_since_ < 0 || now - fastest_since_ >= 2 * kRemembered;
            before_us_ = old ? delay_us : fastest_us_;
            fastest_us_ = delay_us;
            fastest_since_ = now;
        } else if (after(fastest_us_, delay_us)) {
            fastest_us_ = delay_us;
        }
    }
    static constexpr std::size_t kFirstWords = 8, kMostWords = 2 * wire::kReportWords;  // powers of two
    static constexpr std::uint64_t kAllCame = ~std::uint64_t{0};

    // Numbers up to `ahead` after the latest one have been sent and count as missing until they come.
    void expect(int ahead) {
        missing_ += static_cast<std::uint64_t>(ahead);
        const auto most = static_cast<int>(64 * kMostWords);
        latest_ += static_cast<std::uint32_t>(std::max(0, ahead - most));
        for (int k = std::min(ahead, most); k > 0; --k) {
            // The bit to be reused belongs to a number that is still missing: look back further.
            if (!test(latest_ + 1) && came_.size() < kMostWords) grow();
            mark(++latest_, false);
            cut_[latest_ / 64 % cut_.size()] &= ~bit(latest_);
        }
    }
    static constexpr std::uint64_t bit(std::uint32_t number) { return std::uint64_t{1} << number % 64; }
    std::uint64_t came_word(std::uint32_t last, std::size_t back) const {
        const std::uint64_t word = came_[(last - back) % came_.size()];
        // Numbers after `latest` were not sent yet.
        return back == 0 ? word | ~std::uint64_t{0} << 1 << latest_ % 64 : word;
    }
    bool remembered(std::uint32_t number) const {
        const int back = distance(number, latest_);
        return back >= 0 && back < static_cast<int>(64 * came_.size());
    }
    void mark(std::uint32_t number, bool came) {
        auto& word = came_[number / 64 % came_.size()];
        word = came ? word | bit(number) : word & ~bit(number);
    }
    bool test(std::uint32_t number) const { return came_[number / 64 % came_.size()] >> (number % 64) & 1; }
    void grow() {
        std::vector<std::uint64_t> larger(2 * came_.size(), kAllCame);
        std::swap(came_, larger);
        std::vector<std::uint64_t> cut(came_.size());
        std::swap(cut_, cut);
        for (std::uint32_t k = 0; k < 64 * larger.size(); ++k) {
            const std::uint32_t number = latest_ - k, word = number / 64 % larger.size();
            if (!(larger[word] & bit(number))) mark(number, false);
            if (cut[word] & bit(number)) note_cut(number);
        }
    }

    // One bit per number, modulo the size. It grows when what is missing lies further back. What was never
    // sent is not missing.
    std::vector<std::uint64_t> came_ = std::vector<std::uint64_t>(kFirstWords, kAllCame);
    std::vector<std::uint64_t> cut_ =
        std::vector<std::uint64_t>(kFirstWords);  // as many: numbers that came trimmed
    std::uint32_t latest_ = 0;
    std::uint32_t stamp_us_ = 0, arrival_us_ = 0;
    std::uint32_t least_delay_us_ = 0;
    bool delay_known_ = false;
    std::uint32_t fastest_us_ = 0, before_us_ = 0;  // the least delay since that time, and in the time before
    Time fastest_since_ = -1;
    std::uint32_t unreported_ = 0;
    std::uint64_t came_count_ = 0, missing_ = 0;
};

}  // namespace tailcut
