// A set of granules, with operations on runs [first, last).
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

namespace tailcut {

class GranuleSet {
public:
    GranuleSet() = default;
    explicit GranuleSet(std::uint32_t size) : words_((size + 63) / 64) {}

    std::uint32_t capacity() const { return static_cast<std::uint32_t>(64 * words_.size()); }

    void set(std::uint32_t first, std::uint32_t last) {
        each_word(first, last, [&](std::uint32_t w, std::uint64_t mask) {
            words_[w] |= mask;
            return true;
        });
    }
    void clear(std::uint32_t first, std::uint32_t last) {
        each_word(first, last, [&](std::uint32_t w, std::uint64_t mask) {
            words_[w] &= ~mask;
            return true;
        });
    }
    bool any(std::uint32_t first, std::uint32_t last) const {
        return !each_word(first, last,
                          [&](std::uint32_t w, std::uint64_t mask) { return !(words_[w] & mask); });
    }
    bool all(std::uint32_t first, std::uint32_t last) const {
        return each_word(first, last,
                         [&](std::uint32_t w, std::uint64_t mask) { return (words_[w] & mask) == mask; });
    }
    std::uint32_t count(std::uint32_t first, std::uint32_t last) const {
        std::uint32_t n = 0;
        each_word(first, last, [&](std::uint32_t w, std::uint64_t mask) {
            n += static_cast<std::uint32_t>(std::popcount(words_[w] & mask));
            return true;
        });
        return n;
    }
    void keep_only(const GranuleSet& other) {
        for (std::size_t w = 0; w < words_.size(); ++w) words_[w] &= other.words_[w];
    }
    void operator|=(const GranuleSet& other) {
        for (std::size_t w = 0; w < words_.size(); ++w) words_[w] |= other.words_[w];
    }
    void remove(const GranuleSet& other) {
        for (std::size_t w = 0; w < words_.size(); ++w) words_[w] &= ~other.words_[w];
    }
    bool contains(const GranuleSet& other) const {
        for (std::size_t w = 0; w < words_.size(); ++w)
            if (other.words_[w] & ~words_[w]) return false;
        return true;
    }
    bool none() const {
        return std::all_of(words_.begin(), words_.end(), [](std::uint64_t word) { return word == 0; });
    }
    bool test(std::uint32_t g) const { return words_[g / 64] >> (g % 64) & 1; }

    // The end of the run that begins with `first` and in which all granules are in the set, or all are not.
    std::uint32_t run_end(std::uint32_t first, std::uint32_t last) const {
        const std::uint64_t same = test(first) ? ~std::uint64_t{0} : 0;
        for (std::uint32_t at = first; at < last; at += 64 - at % 64)
            if (const std::uint64_t other = (words_[at / 64] ^ same) >> (at % 64))
                return std::min(last, at + static_cast<std::uint32_t>(std::countr_zero(other)));
        return last;
    }

    // Visits the runs of [first, last) whose granules are in the set.
    template <typename Visit>
    void each_run(std::uint32_t first, std::uint32_t last, Visit visit) const {
        for (std::uint32_t end; first < last; first = end) {
            end = run_end(first, last);
            if (test(first)) visit(first, end);
        }
    }

private:
    template <typename Visit>
    static bool each_word(std::uint32_t first, std::uint32_t last, Visit visit) {
        for (std::uint32_t at = first; at < last;) {
            const std::uint32_t in_word = at % 64;
            const std::uint32_t n = std::min(64 - in_word, last - at);
            const std::uint64_t mask = (n == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << n) - 1) << in_word;
            if (!visit(at / 64, mask)) return false;
            at += n;
        }
        return true;
    }

    std::vector<std::uint64_t> words_;
};

}  // namespace tailcut
