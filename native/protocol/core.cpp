#include "protocol/core.hpp"

#include "protocol/endpoint.hpp"
#include "protocol/grid/grid_core.hpp"

namespace tailcut {

std::unique_ptr<Core> make_core(const Settings& settings, const std::vector<PeerSettings>& peers) {
    if (settings.rows > 1) return std::make_unique<GridCore>(settings, peers);
    return std::make_unique<Endpoint>(settings, peers);
}

std::vector<std::uint64_t> tags_to(std::uint64_t group_tag, Rank rank, Rank ranks, Rank rows) {
    return rows > 1 ? GridCore::tags(group_tag, rank, ranks, rows) : std::vector{group_tag};
}

Rank senders_to_one(Rank ranks, Rank rows) { return rows > 1 ? GridCore::senders(ranks, rows) : ranks; }

}  // namespace tailcut
