#include "protocol/sending/late_service.hpp"

#include <algorithm>
#include <iterator>

namespace tailcut {

Op* LateService::op_for(Rank rank) {
    if (!ops_.takes_late(rank) || !links_[rank].path.idle()) return nullptr;
    Op* op = late_op(rank);
    return op && nothing_else_to_send() ? op : nullptr;
}

Op* LateService::late_op(Rank rank) {
    std::set<Seq>& late = ops_.late(rank);
    for (auto at = late.begin(); at != late.end();) {
        const auto slot = ops_.slots().find(*at);
        bool settled = true;
        if (slot != ops_.slots().end())
            for (auto& op : slot->second.variants) {
                if (op->owes_late(rank) || links_[rank].path.lost().any(*at)) return op.get();
                settled &= op->reduced() && (op->ended() || !op->entered());
            }
        at = settled ? late.erase(at) : std::next(at);
    }
    return nullptr;
}

// Ignores ranks that do not answer, and the history that a rank which is behind has no room for.
bool LateService::nothing_else_to_send() {
    auto& slots = ops_.slots();
    const auto idle = [&](Seq from, const auto& pending) {
        for (auto at = slots.lower_bound(from); at != slots.end(); ++at)
            if (std::ranges::any_of(at->second.variants, pending)) return false;
        return true;
    };
    for (Rank rank = 0; rank < roster_.ranks(); ++rank) {
        if (rank == roster_.self() || !ops_.takes_late(rank)) continue;
        const bool lags = ops_.lags(rank);
        const Seq from = lags ? ops_.first_timed() : links_[rank].served_below;
        if (!idle(from, [&](const auto& op) { return lags ? op->owes(rank) : op->pending(rank); }))
            return false;
    }
    return idle(links_.everybody.served_below,
                [](const auto& op) { return op->pending(Destination::everybody()); });
}

}  // namespace tailcut
