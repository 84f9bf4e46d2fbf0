#include "protocol/ops/received_means.hpp"

#include <utility>

namespace tailcut {

ReceivedMeans::ReceivedMeans(const OpContext& context, const Plan& plan, Block memory)
    : context_(context),
      plan_(plan),
      values_(context.values.means(context, plan, std::move(memory))),
      last_at_(plan.layout.ranks, -1),
      last_parts_(plan.layout.ranks) {
    for (Rank shard = 0; shard < plan.layout.ranks; ++shard) {
        answered_.emplace_back(plan.layout.granules(shard));
        held_.emplace_back(plan.layout.granules(shard));
    }
}

void ReceivedMeans::enter(Time now, std::span<float> bucket) {
    last_parts_.note(context_.shape.self, now);
    values_->enter(bucket, held_);
}

std::optional<wire::Reject> ReceivedMeans::place(Time now, const wire::Header& header,
                                                 std::span<const std::byte> payload) {
    const Rank shard = header.shard;
    const std::uint32_t first = header.first / kGranule;
    std::uint32_t last = header.count == 0 ? plan_.layout.granules(shard)  // EMPTY for the whole shard
                                           : first + (header.count + kGranule - 1) / kGranule;
    if (answered_[shard].any(first, last)) return wire::Reject::kDuplicate;
    last_at_[header.source] = now;
    if (header.flags & wire::kLastPart) last_parts_.note(header.source, now);
    if (!header.empty()) {
        last = first + wire::delivered_granules(header, payload.size());
        if (first == last) return std::nullopt;  // trimmed to nothing
        values_->place(header, first, last, payload);
        held_[shard].set(first, last);
    }
    answered_[shard].set(first, last);
    answered_granules_ += last - first;
    values_->note_answers(shard, first, last, answered_[shard], held_[shard]);
    return std::nullopt;
}

void ReceivedMeans::owner_left(Rank owner, Time now) {
    const Rank shard = plan_.shard_of(owner);
    const std::uint32_t granules = plan_.layout.granules(shard);
    answered_granules_ += granules - answered_[shard].count(0, granules);
    answered_[shard].set(0, granules);
    last_parts_.note(owner, now);
}

void ReceivedMeans::end() { values_->end(plan_.own_shard(), held_); }

void ReceivedMeans::drop() {
    for (Rank shard = 0; shard < plan_.layout.ranks; ++shard)
        held_[shard] = GranuleSet(plan_.layout.granules(shard));
}

}  // namespace tailcut
