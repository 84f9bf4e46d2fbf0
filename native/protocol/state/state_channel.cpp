#include "protocol/state/state_channel.hpp"

#include <algorithm>
#include <utility>

namespace tailcut {
namespace {

constexpr std::size_t kMostOutstanding = 16;

// Senders of DATA have promised each other seven tenths of our socket buffer. This takes half of the rest.
std::size_t most_outstanding(const Settings& settings, const Links& links) {
    std::uint32_t run_bytes = 1;
    for (const Link& link : links.peers) run_bytes = std::max(run_bytes, link.settings.limits.payload_bytes);
    const std::uint64_t room = std::uint64_t{settings.window_bytes} * (settings.shape.ranks - 1) / 5;
    return std::clamp<std::size_t>(room / (run_bytes + kDatagramOverheadBytes), 1, kMostOutstanding);
}

}  // namespace

StateChannel::StateChannel(const Settings& settings, const Links& links)
    : self_(settings.shape.self),
      links_(links),
      most_outstanding_(most_outstanding(settings, links)),
      offers_(settings.shape.ranks),
      fetches_(settings.shape.ranks) {}

void StateChannel::fetch(Ticket ticket, Rank server, std::uint64_t id, std::uint64_t most_bytes) {
    if (server >= fetches_.size() || server == self_) {
        fetched_.push_back({ticket, FetchStatus::kAbsent, {}});
        return;
    }
    const std::uint32_t run_bytes =
        std::min(links_[server].settings.limits.payload_bytes, wire::kMostRunBytes);
    fetches_[server].emplace_back(ticket, next_number_++, id, most_bytes, run_bytes);
    ++fetch_count_;
}

void StateChannel::cancel(Ticket ticket) {
    for (auto& queue : fetches_)
        fetch_count_ -= std::erase_if(queue, [&](const Fetch& fetch) { return fetch.ticket() == ticket; });
    std::erase_if(fetched_, [&](const Fetched& blob) { return blob.ticket == ticket; });
}

std::optional<wire::Reject> StateChannel::receive(Time now, const wire::Header& header,
                                                  std::span<const std::byte> payload) {
    if (!header.answer()) return offers_.ask(header);
    Fetch* const fetch = active(header.source);
    if (!fetch) return wire::Reject::kLate;
    const auto reason = fetch->take(now, header, payload);
    if (fetch->ended()) end_first(header.source);
    return reason;
}

void StateChannel::end_first(Rank server) {
    fetched_.push_back(fetches_[server].front().take());
    fetches_[server].pop_front();
    --fetch_count_;
}

bool StateChannel::pending() const {
    if (offers_.waiting()) return true;
    return fetch_count_ > 0 && outstanding() < most_outstanding_ &&
           std::any_of(fetches_.begin(), fetches_.end(), [&](const auto& queue) { return may_ask(queue); });
}

bool StateChannel::urgent() const {
    if (offers_.urgent()) return true;
    return fetch_count_ > 0 && std::any_of(fetches_.begin(), fetches_.end(), [&](const auto& queue) {
               return may_ask(queue) && queue.front().id() >= kRejoinIds;
           });
}

bool StateChannel::next(Time now, Outgoing& out) {
    if (offers_.next(out, [&](Rank rank) { return links_[rank].settings.limits.payload_bytes; })) return true;
    if (fetch_count_ == 0 || outstanding() >= most_outstanding_) return false;
    for (std::size_t step = 0; step < fetches_.size(); ++step) {
        const auto server = static_cast<Rank>(turn_++ % fetches_.size());
        if (!may_ask(fetches_[server])) continue;
        out = {};
        out.to = server;
        fetches_[server].front().ask(now, out.header);
        return true;
    }
    return false;
}

// An answer that was not sent is asked for again. A request is ours to repeat.
void StateChannel::retract(const Outgoing& out) {
    if (out.header.answer()) return;
    Fetch* const fetch = active(out.to.rank());
    if (fetch && fetch->outstanding() > 0 && fetch->number() == out.header.seq) fetch->unask();
}

std::size_t StateChannel::outstanding() const {
    std::size_t sum = 0;
    for (const auto& queue : fetches_)
        if (!queue.empty()) sum += queue.front().outstanding();
    return sum;
}

Time StateChannel::next_timer() const {
    Time soonest = kNever;
    if (fetch_count_ == 0) return soonest;
    for (const auto& queue : fetches_)
        if (!queue.empty()) soonest = std::min(soonest, queue.front().next_timer());
    return soonest;
}

void StateChannel::advance(Time now) {
    if (fetch_count_ == 0) return;
    for (auto& queue : fetches_)
        if (!queue.empty()) queue.front().advance(now);
}

}  // namespace tailcut
