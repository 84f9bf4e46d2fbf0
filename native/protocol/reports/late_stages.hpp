// Stages that ended without all packets, and what came of them later (rule 9). When all that was missing has
// come, it is known how long the stage would have taken.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "protocol/ops/granules.hpp"
#include "protocol/ops/op.hpp"
#include "protocol/reports/report.hpp"

namespace tailcut {

class LateStages {
public:
    explicit LateStages(Rank ranks) : ranks_(ranks) {}

    void note_end(const OpReport& report, const Op& op);
    void note_packet(Time now, const wire::Header& header,
                     std::size_t payload_bytes);  // of a packet whose stage is over
    // Adds what has come since the last report.
    void tell(OpReport& report);

private:
    struct Cut {
        Seq seq;
        wire::Stage stage;
        BucketId bucket;  // an op that was void had another one, which was cut otherwise
        Layout layout;
        Time from;
        std::int64_t missing;  // coordinates still missing
        // What has come since, for each rank that was awaited and from which some were missing.
        std::vector<std::pair<Rank, GranuleSet>> came;
        std::uint32_t late_coords = 0;  // coordinates that have come with a mean since the last report
    };
    void note_cut(const OpReport& report, const Op& op, wire::Stage stage);

    const Rank ranks_;
    std::deque<Cut> cuts_;  // latest last
    std::vector<LateCompletion> complete_;
};

}  // namespace tailcut
