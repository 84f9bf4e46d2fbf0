#include "protocol/reports/late_stages.hpp"

#include <algorithm>

namespace tailcut {
namespace {

constexpr std::size_t kMostCuts = 64;  // stages whose late packets are still counted

}  // namespace

void LateStages::tell(OpReport& report) {
    report.late = std::exchange(complete_, {});
    for (const Cut& cut : cuts_)
        if (cut.seq + 1 == report.seq) report.late_coords += cut.late_coords;
}

void LateStages::note_end(const OpReport& report, const Op& op) {
    note_cut(report, op, wire::Stage::kScatter);
    note_cut(report, op, wire::Stage::kGather);
    while (cuts_.size() > kMostCuts) cuts_.pop_front();
}

void LateStages::note_cut(const OpReport& report, const Op& op, wire::Stage stage) {
    const bool scatter = stage == wire::Stage::kScatter;
    const StageReport& ended = scatter ? report.scatter : report.gather;
    if (ended.ended_by == Ending::kAll || !ended.began) return;
    Cut cut{report.seq, stage, op.bucket(), op.layout(), report.entered_at + *ended.began, 0, {}};
    for (Rank rank = 0; rank < ranks_; ++rank) {
        const LinkReport& link = report.links[rank];
        const std::uint32_t missing =
            scatter ? (link.abstained ? 0 : link.scatter.missing) : link.gather.missing;
        if (missing == 0 || link.silent || (scatter && !link.awaited)) continue;
        cut.missing += missing;
        cut.came.emplace_back(rank, op.came(stage, rank));
    }
    if (cut.missing > 0) cuts_.push_back(std::move(cut));
}

void LateStages::note_packet(Time now, const wire::Header& header, std::size_t payload_bytes) {
    const auto cut = std::find_if(cuts_.begin(), cuts_.end(), [&](const Cut& c) {
        return c.seq == header.seq && c.stage == header.stage() && c.bucket == bucket_of(header);
    });
    const bool gather = header.stage() == wire::Stage::kGather;
    if (cut == cuts_.end() || cut->missing <= 0 || (header.empty() && !gather)) return;
    for (auto& [rank, came] : cut->came) {
        if (rank != header.source) continue;
        const Layout& layout = cut->layout;
        const std::uint32_t first = header.first / kGranule;
        const std::uint32_t last = header.count == 0
                                       ? layout.granules(header.shard)
                                       : first + wire::delivered_granules(header, payload_bytes);
        for (std::uint32_t g = first, end; g < last; g = end) {  // a granule that came twice counts once
            end = came.run_end(g, last);
            if (came.test(g)) continue;
            const std::uint32_t coords = layout.coords(header.shard, g, end);
            cut->missing -= coords;
            if (gather && !header.empty()) cut->late_coords += coords;
        }
        came.set(first, last);
    }
    if (cut->missing > 0) return;
    complete_.push_back({cut->seq, cut->stage, cut->layout.bucket_len, now - cut->from});
    cut->came = {};
}

}  // namespace tailcut
