#include "protocol/state/fetch.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace tailcut {
namespace {

// Enough for 100 MB/s at a round trip of 0.2 ms and packets of 1,500 bytes, and too few to fill a port.
constexpr std::size_t kWindowRuns = 16;
// A server that cut a blob into shorter runs would make us keep account of too many.
constexpr std::uint32_t kLeastRunBytes = 64;

}  // namespace

// A rank that does not answer is asked for one run at a time.
std::size_t Fetch::window() const { return silent_ ? 1 : kWindowRuns; }

void Fetch::ask(Time now, wire::Header& request) {
    const bool again = !again_.empty();
    const std::uint64_t run = again ? again_.front() : fresh_++;
    if (again) again_.pop_front();
    while (!again_.empty() && come_[again_.front()]) again_.pop_front();
    asked_.push_back({run, now, again});
    request.type = wire::Type::kState;
    request.seq = number_;
    request.blob_id = id_;
    request.blob_first = run * run_bytes_;
    request.run_bytes = run_bytes_;
    request.edition = edition_;
}

void Fetch::unask() {
    again_.push_front(asked_.back().run);
    asked_.pop_back();
}

void Fetch::advance(Time now) {
    bool rang = false;
    for (; !asked_.empty() && asked_.front().at + patience_ <= now; asked_.pop_front(), rang = true)
        again_.push_back(asked_.front().run);
    if (!rang) return;
    silent_ = true;
    patience_ = std::min(2 * patience_, kMostPatience);
}

std::optional<wire::Reject> Fetch::take(Time now, const wire::Header& answer,
                                        std::span<const std::byte> payload) {
    if (answer.seq != number_ || answer.blob_id != id_) return wire::Reject::kLate;
    if (answer.absent()) {
        if (answer.edition != edition_) return wire::Reject::kLate;
        fetched_.status = FetchStatus::kAbsent;
        fetched_.bytes = {};
        return std::nullopt;
    }
    if (edition_ == 0 && !begin(answer)) return wire::Reject::kShape;
    if (ended()) return std::nullopt;
    if (answer.edition != edition_ || answer.blob_bytes != fetched_.bytes.size()) return wire::Reject::kLate;
    const std::uint64_t run = answer.blob_first / run_bytes_;
    const std::uint64_t wanted = std::min<std::uint64_t>(run_bytes_, answer.blob_bytes - answer.blob_first);
    if (answer.blob_first % run_bytes_ != 0 || answer.run_bytes != wanted || run >= fresh_)
        return wire::Reject::kShape;
    if (come_[run]) return wire::Reject::kDuplicate;

    if (!payload.empty())
        std::memcpy(fetched_.bytes.data() + answer.blob_first, payload.data(), payload.size());
    come_[run] = true;
    if (++come_count_ == runs_) fetched_.status = FetchStatus::kComplete;
    while (!again_.empty() && come_[again_.front()]) again_.pop_front();
    const auto asked =
        std::find_if(asked_.begin(), asked_.end(), [&](const Asked& other) { return other.run == run; });
    if (asked != asked_.end()) {
        learn_time(now, *asked);
        asked_.erase(asked);
    }
    silent_ = false;
    return std::nullopt;
}

bool Fetch::begin(const wire::Header& answer) {
    const bool whole = answer.run_bytes == answer.blob_bytes;
    if (answer.blob_first != 0 || answer.run_bytes > run_bytes_ || fresh_ == 0) return false;
    if (!whole && answer.run_bytes < kLeastRunBytes) return false;
    edition_ = answer.edition;
    if (answer.blob_bytes > most_bytes_) {
        fetched_.status = FetchStatus::kTooLarge;
        return true;
    }
    run_bytes_ = std::max(1u, answer.run_bytes);
    runs_ = std::max<std::uint64_t>(1, (answer.blob_bytes + run_bytes_ - 1) / run_bytes_);
    fetched_.bytes.resize(answer.blob_bytes);
    come_.resize(runs_);
    return true;
}

// Answers come behind everything alive at the server, so their time says more than that of a round trip.
void Fetch::learn_time(Time now, const Asked& asked) {
    if (!asked.again) {
        const Duration took = now - asked.at;
        smooth_ = smooth_ == 0 ? took : smooth_ + (took - smooth_) / 8;
    }
    patience_ = std::clamp(4 * smooth_, kFirstPatience, kMostPatience);
}

}  // namespace tailcut
