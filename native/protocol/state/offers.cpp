#include "protocol/state/offers.hpp"

#include <algorithm>
#include <utility>

namespace tailcut {
namespace {

// A rank has fewer requests outstanding, so that more of them are not honest ones.
constexpr std::size_t kMostWaiting = 32;

}  // namespace

void Offers::offer(std::uint64_t id, Blob blob) {
    if (++latest_edition_ == 0) ++latest_edition_;  // 0 stands for any
    offers_[id] = {std::move(blob), latest_edition_};
}

std::optional<wire::Reject> Offers::ask(const wire::Header& request) {
    std::deque<Request>& queue = waiting_[request.source];
    const bool offered = offers_.contains(request.blob_id), rejoin = request.blob_id >= kRejoinIds;
    if (rejoin && !offered) wanted_[request.source] = request.blob_id;
    const Request asked{request.blob_id,   request.blob_first, request.seq,
                        request.run_bytes, request.edition,    rejoin && offered};
    // It is asked again because the answer has had to wait.
    if (std::find(queue.begin(), queue.end(), asked) != queue.end()) return wire::Reject::kDuplicate;
    if (queue.size() >= kMostWaiting) return wire::Reject::kPool;
    queue.push_back(asked);
    ++waiting_count_;
    urgent_count_ += asked.urgent;
    return std::nullopt;
}

// A blob that is not there, another edition and a run beyond the end of the blob are all answered ABSENT.
void Offers::answer(const Request& request, std::uint32_t most_bytes, Outgoing& out) const {
    wire::Header& header = out.header;
    header.type = wire::Type::kState;
    header.flags = wire::kAnswer | wire::kAbsent;
    header.seq = request.fetch;
    header.blob_id = request.id;
    header.blob_first = request.first;
    header.edition = request.edition;
    const auto found = offers_.find(request.id);
    if (found == offers_.end()) return;
    const Offer& offer = found->second;
    const std::size_t size = offer.blob->size();
    if (request.edition != 0 && request.edition != offer.edition) return;
    if (request.first > size || (request.first == size && size > 0)) return;
    const std::size_t left = size - static_cast<std::size_t>(request.first);
    header.flags = wire::kAnswer;
    header.edition = offer.edition;
    header.blob_bytes = size;
    header.run_bytes = static_cast<std::uint32_t>(std::min<std::size_t>({left, request.bytes, most_bytes}));
    out.payload = std::span(*offer.blob).subspan(static_cast<std::size_t>(request.first), header.run_bytes);
    out.keeper = offer.blob;
}

}  // namespace tailcut
