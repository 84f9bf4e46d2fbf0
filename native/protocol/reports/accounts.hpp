// What an endpoint counts, and what it adds to the report of an op: what its links lost since the last
// report, and earlier stages that were cut and have turned out complete since.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "protocol/ops/op.hpp"
#include "protocol/reports/counters.hpp"
#include "protocol/reports/late_stages.hpp"
#include "protocol/reports/report.hpp"
#include "protocol/sending/links.hpp"

namespace tailcut {

class Accounts {
public:
    Accounts(Rank ranks, const Links& links)
        : ranks_(ranks), links_(links), reported_(ranks), lacked_(ranks), late_(ranks) {}

    Counters counters;

    void reject(wire::Reject reason) { ++counters.rejected[static_cast<std::size_t>(reason)]; }
    void count_word(const Outgoing& out, int sign = 1) {  // a FEEDBACK or GOODBYE
        counters.feedback_packets += sign;
        counters.feedback_bytes += sign * (wire::kHeaderBytes + out.payload.size());
        counters.probe_packets += sign * ((out.header.flags & wire::kReplyWanted) != 0);
    }
    void count_state(const Outgoing& out, int sign = 1) {
        counters.state_packets += sign;
        counters.state_bytes += sign * (wire::kHeaderBytes + out.payload.size());
    }
    // A packet of a stage that is over has come.
    void note_late(Time now, const wire::Header& header, std::size_t payload_bytes);
    void complete(OpReport& report, const Op& op);

    // tell_lacked() writes into a FEEDBACK what this rank lacked of a rank's mean. hear_lacked() reads what
    // another rank lacked of ours.
    void tell_lacked(Rank rank, wire::Header& header) const;
    void hear_lacked(const wire::Header& header);

private:
    struct Reported {  // of a link, up to the last report
        std::uint64_t sent = 0, lost = 0, came = 0, missing = 0, delivered_bytes = 0;
        Duration busy = 0;
    };
    struct Lacked {
        float own = 0;         // what we lacked of its mean, in the latest op that has ended here
        std::uint16_t op = 0;  // that op, modulo 2^16
        float told = 0;        // what it says it lacked of ours, since the last report
        int told_op = -1;      // the latest op that it has spoken of, modulo 2^16
    };
    void complete_links(OpReport& report);

    const Rank ranks_;
    const Links& links_;
    std::vector<Reported> reported_;  // by rank
    std::vector<Lacked> lacked_;      // by rank
    LateStages late_;
    std::uint64_t told_verdicts_ = 0;  // split verdicts up to the last report
};

}  // namespace tailcut
