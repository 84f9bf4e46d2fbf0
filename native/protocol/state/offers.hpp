// The blobs that this rank offers, and the requests for them that wait to be answered. The server side of
// STATE: it knows nothing of who fetches what or how far they are. A rank that gets no answer asks again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "base/types.hpp"
#include "protocol/sending/outgoing.hpp"
#include "wire/header.hpp"

namespace tailcut {

using Blob = std::shared_ptr<const std::vector<std::byte>>;

// Blobs of a rejoin have ids from here on. The latest one that a rank has asked for in vain is remembered:
// the request is a wish. Answers that carry one are urgent.
constexpr std::uint64_t kRejoinIds = 0xFFFF'0000'0000'0000;

class Offers {
public:
    explicit Offers(Rank ranks) : waiting_(ranks) {}

    // Offers the blob under this id from now on, in place of an earlier one.
    void offer(std::uint64_t id, Blob blob);
    void withdraw(std::uint64_t id) { offers_.erase(id); }

    // A request has come. It waits until next(), or is refused.
    std::optional<wire::Reject> ask(const wire::Header& request);
    bool waiting() const { return waiting_count_ > 0; }
    bool urgent() const { return urgent_count_ > 0; }            // whether some of them are
    std::map<Rank, std::uint64_t>& wanted() { return wanted_; }  // by rank; the driver takes them
    // The next answer, the ranks in turns; a payload has at most `most_bytes[rank]` bytes.
    template <typename MostBytes>
    bool next(Outgoing& out, MostBytes most_bytes) {
        for (std::size_t step = 0; step < waiting_.size() && waiting(); ++step) {
            const auto rank = static_cast<Rank>(turn_++ % waiting_.size());
            if (waiting_[rank].empty()) continue;
            const Request request = waiting_[rank].front();
            waiting_[rank].pop_front();
            --waiting_count_;
            urgent_count_ -= request.urgent;
            out = {};
            out.to = rank;
            answer(request, most_bytes(rank), out);
            return true;
        }
        return false;
    }

private:
    struct Offer {
        Blob blob;
        std::uint16_t edition = 0;
    };
    struct Request {
        std::uint64_t id, first;
        std::uint32_t fetch, bytes;
        std::uint16_t edition;
        bool urgent;

        bool operator==(const Request&) const = default;
    };
    void answer(const Request& request, std::uint32_t most_bytes, Outgoing& out) const;

    std::unordered_map<std::uint64_t, Offer> offers_;
    std::vector<std::deque<Request>> waiting_;  // by rank
    std::size_t waiting_count_ = 0, urgent_count_ = 0, turn_ = 0;
    std::map<Rank, std::uint64_t> wanted_;
    std::uint16_t latest_edition_ = 0;
};

}  // namespace tailcut
