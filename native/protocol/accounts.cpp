#include "protocol/accounts.hpp"

#include <algorithm>

namespace tailcut {
namespace {

constexpr std::size_t kMostCuts = 64;  // stages whose late packets are still counted

}  // namespace

void Accounts::complete(OpReport& report, const Op& op) {
    report.late = std::exchange(late_, {});
    for (const Cut& cut : cuts_)
        if (cut.seq + 1 == report.seq) report.late_coords += cut.late_coords;
    complete_links(report);
    note_cut(report, op, wire::Stage::kScatter);
    note_cut(report, op, wire::Stage::kGather);
    while (cuts_.size() > kMostCuts) cuts_.pop_front();
}

void Accounts::complete_links(OpReport& report) {
    const auto since = [](std::uint64_t now, std::uint64_t& before) {
        return static_cast<std::uint32_t>(now - std::min(now, std::exchange(before, now)));
    };
    for (Rank rank = 0; rank < ranks_; ++rank) {
        const Link& link = links_[rank];
        std::uint64_t sent = link.path.sent_packets(), lost = link.path.lost_packets();
        if (const int member = links_.audience.index(rank); member >= 0) {
            sent += links_.everybody.settled_packets(static_cast<std::size_t>(member));
            lost += links_.everybody.lost_packets(static_cast<std::size_t>(member));
        }
        const auto both = [&](auto count) {
            return (link.arrivals.*count)() + (link.multicast.arrivals.*count)();
        };
        Reported& before = reported_[rank];
        LinkReport& told = report.links[rank];
        told.sent_packets = since(sent, before.sent);
        told.sent_lost_packets = since(lost, before.lost);
        told.received_packets = since(both(&Arrivals::came), before.came);
        told.received_lost_packets = since(both(&Arrivals::missing), before.missing);
    }
}

void Accounts::note_cut(const OpReport& report, const Op& op, wire::Stage stage) {
    const bool scatter = stage == wire::Stage::kScatter;
    const StageReport& ended = scatter ? report.scatter : report.gather;
    if (ended.ended_by == Ending::kAll || !ended.began) return;
    Cut cut{report.seq, stage, report.bucket_len, report.entered_at + *ended.began, 0, {}};
    for (Rank rank = 0; rank < ranks_; ++rank) {
        const LinkReport& link = report.links[rank];
        const std::uint32_t missing =
            scatter ? (link.abstained ? 0 : link.scatter.missing) : link.gather.missing;
        if (missing == 0 || link.silent) continue;
        cut.missing += missing;
        cut.came.emplace_back(rank, op.came(stage, rank));
    }
    if (cut.missing > 0) cuts_.push_back(std::move(cut));
}

void Accounts::note_late(Time now, const wire::Header& header, std::size_t payload_bytes) {
    ++counters.traffic.late_packets;
    const auto cut = std::find_if(cuts_.begin(), cuts_.end(), [&](const Cut& c) {
        return c.seq == header.seq && c.stage == header.stage() && c.bucket_len == header.bucket_len;
    });
    const bool gather = header.stage() == wire::Stage::kGather;
    if (cut == cuts_.end() || cut->missing <= 0 || (header.empty() && !gather)) return;
    for (auto& [rank, came] : cut->came) {
        if (rank != header.source) continue;
        const Layout layout{header.bucket_len, ranks_};
        const std::uint32_t first = header.first / kGranule;
        const std::uint32_t last = header.count == 0
                                       ? layout.granules(header.shard)
                                       : first + wire::delivered_granules(header, payload_bytes);
        for (std::uint32_t g = first, end; g < last; g = end) {  // what has come twice counts once
            end = came.run_end(g, last);
            if (came.test(g)) continue;
            const std::uint32_t coords = layout.coords(header.shard, g, end);
            cut->missing -= coords;
            if (gather && !header.empty()) cut->late_coords += coords;
        }
        came.set(first, last);
    }
    if (cut->missing > 0) return;
    late_.push_back({cut->seq, cut->stage, cut->bucket_len, now - cut->from});
    cut->came = {};
}

}  // namespace tailcut
