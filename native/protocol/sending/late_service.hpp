// Rule 9: an owner goes on sending the rest of a mean to a rank that has ended the op without it. That must
// not delay an op that is alive, neither here nor in the peer's port. So it happens when there is nothing
// else to send to anybody, and nobody queues on the way. If a packet of it is lost, it is not sent again.
#pragma once

#include "protocol/ops/ops.hpp"
#include "protocol/roster.hpp"
#include "protocol/sending/links.hpp"

namespace tailcut {

class LateService {
public:
    LateService(const Roster& roster, Ops& ops, const Links& links)
        : roster_(roster), ops_(ops), links_(links) {}

    // An op whose mean the rank lacks, if now is the time to send it.
    Op* op_for(Rank rank);
    bool nothing_else_to_send();

private:
    Op* late_op(Rank rank);

    const Roster& roster_;
    Ops& ops_;
    const Links& links_;
};

}  // namespace tailcut
