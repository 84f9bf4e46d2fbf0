#include "protocol/sending/late_service.hpp"

namespace tailcut {

Op* LateService::op_for(Rank rank) {
    if (!ops_.takes_late(rank) || !links_[rank].path.idle()) return nullptr;
    Op* op = late_op(rank);
    return op && nothing_else_to_send() ? op : nullptr;
}

Op* LateService::late_op(Rank rank) {
    for (const Seq seq : ops_.late()) {
        const auto slot = ops_.slots().find(seq);
        if (slot == ops_.slots().end()) continue;
        for (auto& op : slot->second.variants)
            if (op->owes_late(rank) || links_[rank].path.lost().any(seq)) return op.get();
    }
    return nullptr;
}

// Ignores ranks that do not answer.
bool LateService::nothing_else_to_send() {
    auto& slots = ops_.slots();
    const auto idle = [&](Destination to, Seq served_below) {
        for (auto at = slots.lower_bound(served_below); at != slots.end(); ++at)
            for (const auto& op : at->second.variants)
                if (op->pending(to)) return false;
        return true;
    };
    for (Rank rank = 0; rank < roster_.ranks(); ++rank)
        if (rank != roster_.self() && ops_.takes_late(rank) && !idle(rank, links_[rank].served_below))
            return false;
    return idle(Destination::everybody(), links_.everybody.served_below);
}

}  // namespace tailcut
