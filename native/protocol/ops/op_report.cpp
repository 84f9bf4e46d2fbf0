// What an op tells its caller when it ends.
#include <algorithm>

#include "codec/hash.hpp"
#include "protocol/ops/op.hpp"

namespace tailcut {

void Op::fill_report(Time now, Status status, Ending ending) {
    report_.status = status;
    report_.seq = plan_.seq;
    report_.bucket_len = plan_.layout.bucket_len;
    report_.own_shard = own_shard();
    report_.epoch = plan_.epoch.number;
    report_.place = shape_.self;
    report_.non_finite = non_finite();
    report_.contributed = contributing_;
    report_.terms.gather = gather_;  // chosen before the entry, if some of the mean was final then
    report_.entered_at = entered_at_;
    report_.ended_at = now;
    if (context_.codec == wire::Codec::kPlanes) {
        report_.scatter.planes = static_cast<std::uint32_t>(scatter_.planes);
        report_.gather.planes = static_cast<std::uint32_t>(gather_.planes);
    }
    report_.energies += owned_->energies();
    report_.energies += means_->energies();
    report_.scatter.ended_by = owned_->ending();
    report_.scatter.began = since_entry(owned_->clock().majority_entered_at());
    report_.scatter.ended = owned_->ended_at() - entered_at_;
    report_.gather.ended_by = ending;
    report_.gather.began = std::max<Duration>(0, *report_.scatter.ended);
    const bool waited = !reliable_.empty() && ending != Ending::kAll;  // for what is reliable
    report_.gather.ended = (waited ? std::min(now, clock_end().at) : now) - entered_at_;
    fill_links();
    // Where owners may skip an op, EMPTY means that they did, and nothing of it follows.
    const bool skipped = skip_above_ > 0 && report_.gather.empty > 0;
    report_.carried = context_.carries(plan_) && !is_void(status) && !skipped;
    report_.coding_carried = !residue_.empty();
}

void Op::fill_links() {
    const auto missing = [&](Rank shard, const GranuleSet& set) {
        std::uint32_t coords = 0;
        for (std::uint32_t g = 0, last, all = plan_.layout.granules(shard); g < all; g = last) {
            last = set.run_end(g, all);
            if (!set.test(g)) coords += plan_.layout.coords(shard, g, last);
        }
        return coords;
    };
    std::uint32_t own_empty = 0;
    for (const Run& run : owned_->runs())
        if (run.empty) own_empty += plan_.layout.coords(own_shard(), run.first, run.last);
    const auto add = [](StageReport& stage, const LinkStage& link) {
        stage.coords += link.coords, stage.missing += link.missing, stage.empty += link.empty;
    };
    for (Rank rank = 0; rank < shape_.ranks; ++rank) {
        LinkReport link;
        link.entered = since_entry(owned_->clock().entered_at(rank));
        link.silent = context_.roster.silent(rank);
        link.awaited = owned_->awaited(rank);
        if (rank != shape_.self)
            link.behind_ops = plan_.seq + 1 - std::min(plan_.seq + 1, context_.roster[rank].entered);
        link.abstained = owned_->abstained(rank);
        link.left = context_.roster[rank].left(plan_.seq);
        link.scatter.coords = plan_.layout.length(own_shard());
        link.scatter.missing = missing(own_shard(), owned_->delivered(rank));
        link.scatter.last = since_entry(owned_->clock().last_at(rank));
        const Rank shard = plan_.shard_of(rank);
        const bool own = rank == shape_.self;
        link.gather.coords = plan_.layout.length(shard);
        link.gather.missing = own ? 0 : missing(shard, means_->answered(shard));
        link.gather.empty = own ? own_empty : missing(shard, means_->held(shard)) - link.gather.missing;
        link.gather.last = since_entry(means_->last_at(rank));
        add(report_.scatter, link.scatter);
        add(report_.gather, link.gather);
        report_.links.push_back(link);
    }
}

// `again`: some of it had come trimmed before, which counts no more.
void Op::note_cut(const wire::Header& header, std::size_t payload_bytes, bool again) {
    const wire::Stage stage = header.stage();
    const Rank from = stage == wire::Stage::kScatter ? header.source : header.shard;
    const std::uint32_t first = header.first / kGranule;
    if (again)
        std::erase_if(report_.cuts, [&](const Cut& cut) {
            return cut.stage == stage && cut.from == from && cut.first == first;
        });
    if (payload_bytes < wire::stated_payload_bytes(header) &&
        wire::delivered_granules(header, payload_bytes) > 0)
        report_.cuts.push_back({plan_.seq, stage, from, first, (header.count + kGranule - 1u) / kGranule,
                                static_cast<std::uint32_t>(payload_bytes)});
}

OpReport Op::so_far() const {
    OpReport report;
    report.status = Status::kPartial;
    report.seq = plan_.seq;
    report.bucket_len = plan_.layout.bucket_len;
    report.own_shard = own_shard();
    report.epoch = plan_.epoch.number;
    report.place = shape_.self;
    report.contributed = contributing_;
    report.entered_at = report.ended_at = entered_ ? entered_at_ : -kMicrosecond;  // before all
    report.terms = report_.terms;
    report.terms.gather = gather_;
    report.terms.key = plan_.bucket.key;
    if (owned_) report.terms.loss_scale_tag = owned_->loss_scale_tag();
    report.cuts = report_.cuts;
    report.links.resize(shape_.ranks);
    for (LinkReport& link : report.links) link.scatter.coords = plan_.layout.length(own_shard());
    for (Rank shard = 0; shard < shape_.ranks; ++shard) {
        report.granules.push_back(plan_.layout.granules(shard));
        report.answered.emplace_back(plan_.layout.granules(shard));
    }
    report.held = report.answered;
    report.contributions.assign(shape_.ranks, report.answered[own_shard()]);
    if (!owned_) return report;
    report.answered[own_shard()] = owned_->final_set();
    for (Rank rank = 0; rank < shape_.ranks; ++rank) {
        report.contributions[rank] = owned_->arrived(rank);
        report.contributions[rank].keep_only(owned_->final_set());
    }
    for (const Run& run : owned_->runs())
        if (!run.empty) report.held[own_shard()].set(run.first, run.last);
    return report;
}

void Op::record_fates(Status status) {
    for (Rank shard = 0; shard < shape_.ranks; ++shard)
        report_.granules.push_back(plan_.layout.granules(shard));
    for (Rank rank = 0; rank < shape_.ranks; ++rank) report_.contributions.push_back(owned_->arrived(rank));
    for (Rank shard = 0; shard < shape_.ranks; ++shard) report_.answered.push_back(means_->answered(shard));
    report_.answered[own_shard()].set(0, plan_.layout.granules(own_shard()));
    report_.held = means_->held();
    report_.held[own_shard()] = GranuleSet(plan_.layout.granules(own_shard()));
    for (const Run& run : owned_->runs())
        if (!run.empty && !is_void(status)) report_.held[own_shard()].set(run.first, run.last);
    if (!context_.elided)
        report_.mean_hash = codec::hash_of(std::as_bytes(
            bucket_.subspan(plan_.layout.begin(own_shard()), plan_.layout.length(own_shard()))));
}

}  // namespace tailcut
