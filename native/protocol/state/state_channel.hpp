// Blobs of bytes that ranks fetch from each other, reliably and in the background: wire type STATE.
//
// A rank offers blobs under ids, and others fetch them. A request asks for a run of a blob, and an answer
// carries it. The server remembers nothing of a fetch; who gets no answer asks again. The outbox asks for
// packets of it when there is nothing else to send, and now and then in any case (see BackgroundTurns).
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <span>
#include <vector>

#include "base/types.hpp"
#include "protocol/sending/links.hpp"
#include "protocol/sending/outgoing.hpp"
#include "protocol/settings.hpp"
#include "protocol/state/fetch.hpp"
#include "protocol/state/offers.hpp"

namespace tailcut {

class StateChannel {
public:
    StateChannel(const Settings& settings, const Links& links);

    // ---- the local rank
    void offer(std::uint64_t id, Blob blob) { offers_.offer(id, std::move(blob)); }
    void withdraw(std::uint64_t id) { offers_.withdraw(id); }
    // Fetches from one rank come one after the other. The outcome is in fetched() later.
    void fetch(Ticket ticket, Rank server, std::uint64_t id, std::uint64_t most_bytes);
    void cancel(Ticket ticket);
    std::vector<Fetched>& fetched() { return fetched_; }  // the driver takes them
    // Blobs of a rejoin that others want and nobody offers, by rank: see Offers.
    std::map<Rank, std::uint64_t>& wanted() { return offers_.wanted(); }

    // ---- the network
    std::optional<wire::Reject> receive(Time now, const wire::Header& header,
                                        std::span<const std::byte> payload);
    bool pending() const;  // whether next() has a packet
    bool urgent() const;   // whether some of them are of a rejoin
    bool next(Time now, Outgoing& out);
    void retract(const Outgoing& out);  // not sent after all; newest first
    Time next_timer() const;
    void advance(Time now);

private:
    // The first fetch of each rank is the one that is under way.
    Fetch* active(Rank server) { return fetches_[server].empty() ? nullptr : &fetches_[server].front(); }
    bool may_ask(const std::deque<Fetch>& queue) const { return !queue.empty() && queue.front().may_ask(); }
    std::size_t outstanding() const;
    void end_first(Rank server);

    const Rank self_;
    const Links& links_;
    const std::size_t most_outstanding_;  // runs, over all servers: what they send meets in our port
    Offers offers_;
    std::vector<std::deque<Fetch>> fetches_;  // by server, oldest first
    std::size_t fetch_count_ = 0, turn_ = 0;
    std::uint32_t next_number_ = 1;
    std::vector<Fetched> fetched_;
};

}  // namespace tailcut
