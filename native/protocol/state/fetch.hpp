// One blob on its way from another rank: which runs of it have come, which are asked for, and when to ask
// again. The requester's side of STATE. The first answer tells the length of the blob and of its runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/types.hpp"
#include "wire/header.hpp"

namespace tailcut {

// kPending is 0, as in Python.
enum class FetchStatus : std::uint8_t { kPending, kComplete, kAbsent, kTooLarge, kClosed };

struct Fetched {
    Ticket ticket = 0;
    FetchStatus status = FetchStatus::kPending;
    std::vector<std::byte> bytes;  // of a complete one
};

class Fetch {
public:
    // `number`: of the fetch, told in every request. A blob of more than `most_bytes` is not taken.
    Fetch(Ticket ticket, std::uint32_t number, std::uint64_t id, std::uint64_t most_bytes,
          std::uint32_t run_bytes)
        : number_(number), id_(id), most_bytes_(most_bytes), run_bytes_(run_bytes) {
        fetched_.ticket = ticket;
    }

    Ticket ticket() const { return fetched_.ticket; }
    std::uint32_t number() const { return number_; }
    std::uint64_t id() const { return id_; }
    bool ended() const { return fetched_.status != FetchStatus::kPending; }
    Fetched take() { return std::move(fetched_); }  // once it has ended

    // ---- asking
    bool may_ask() const { return asked_.size() < window() && (!again_.empty() || fresh_ < runs_); }
    std::size_t outstanding() const { return asked_.size(); }
    void ask(Time now, wire::Header& request);  // only if may_ask()
    void unask();                               // the latest request was not sent after all
    Time next_timer() const { return asked_.empty() ? kNever : asked_.front().at + patience_; }
    void advance(Time now);

    // ---- what comes
    std::optional<wire::Reject> take(Time now, const wire::Header& answer,
                                     std::span<const std::byte> payload);

private:
    struct Asked {
        std::uint64_t run;
        Time at;
        bool again;
    };
    std::size_t window() const;
    bool begin(const wire::Header& answer);  // with what the first answer tells; false: it is not sound
    void learn_time(Time now, const Asked& asked);

    std::uint32_t number_;
    std::uint64_t id_, most_bytes_;
    Fetched fetched_;
    std::uint32_t run_bytes_;
    std::uint16_t edition_ = 0;           // 0: nothing has come yet
    std::uint64_t runs_ = 1, fresh_ = 0;  // of the blob; those below fresh_ were asked for at least once
    std::uint64_t come_count_ = 0;
    std::vector<bool> come_;           // by run
    std::deque<Asked> asked_;          // not answered yet, oldest first
    std::deque<std::uint64_t> again_;  // to be asked for again; the first one has not come
    bool silent_ = true;               // nothing has come since the timer last rang
    Duration smooth_ = 0, patience_ = kFirstPatience;

    static constexpr Duration kFirstPatience = 20 * kMillisecond, kMostPatience = 1000 * kMillisecond;
};

}  // namespace tailcut
