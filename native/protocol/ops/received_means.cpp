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
        if (!plan.layout.owned(shard)) last_parts_.note(plan.owner(shard), 0);  // nobody waits for it
    }
}

void ReceivedMeans::enter(Time now, std::span<float> bucket, bool own) {
    last_parts_.note(context_.shape.self, now);
    values_->enter(bucket, held_, own);
}

std::pair<std::uint32_t, std::uint32_t> ReceivedMeans::granules_of(const wire::Header& header) const {
    const std::uint32_t first = header.first / kGranule;
    if (header.count == 0) return {first, plan_.layout.granules(header.shard)};  // EMPTY for the whole shard
    return {first, first + (header.count + kGranule - 1) / kGranule};
}

std::optional<wire::Reject> ReceivedMeans::place(Time now, const wire::Header& header,
                                                 std::span<const std::byte> payload) {
    const Rank shard = header.shard;
    GranuleSet& answered = answered_[shard];
    auto [first, last] = granules_of(header);
    const std::uint32_t before = answered.count(first, last);
    // What came trimmed before may come whole now.
    const bool whole = !header.empty() && payload.size() == wire::stated_payload_bytes(header);
    if (before > 0 && !(whole && values_->refine(header, first, last, answered)))
        return wire::Reject::kDuplicate;
    last_at_[header.source] = now;
    if (header.flags & wire::kLastPart) last_parts_.note(header.source, now);
    if (!header.empty()) last = first + wire::delivered_granules(header, payload.size());
    for (std::uint32_t g = first, end; g < last; g = end) {
        end = answered.run_end(g, last);
        if (answered.test(g)) continue;
        if (!header.empty() && !values_->place(header, g, end, payload)) return wire::Reject::kPool;
        answered.set(g, end);
        if (!header.empty()) held_[shard].set(g, end);
        values_->note_answers(shard, g, end, answered, held_[shard]);
    }
    answered_granules_ += answered.count(first, std::max(first, last)) - before;
    return std::nullopt;
}

void ReceivedMeans::owner_left(Rank owner, Time now) {
    const Rank shard = plan_.shard_of(owner);
    const std::uint32_t granules = plan_.layout.granules(shard);
    answered_granules_ += granules - answered_[shard].count(0, granules);
    answered_[shard].set(0, granules);
    if (granules > 0) values_->note_answers(shard, 0, granules, answered_[shard], held_[shard]);
    last_parts_.note(owner, now);
}

void ReceivedMeans::end(const StandIn& stand_in) { values_->end(stand_in, answered_, held_); }

void ReceivedMeans::drop() {
    for (Rank shard = 0; shard < plan_.layout.ranks; ++shard)
        held_[shard] = GranuleSet(plan_.layout.granules(shard));
}

// ---- after the end ----------------------------------------------------------------------------------------

bool ReceivedMeans::lacking() const {
    for (Rank shard = 0; shard < plan_.layout.ranks; ++shard)
        if (shard != plan_.own_shard() && !has_all(shard)) return true;
    return false;
}

std::uint64_t ReceivedMeans::lacking_coords() const {
    std::uint64_t coords = 0;
    for (Rank shard = 0; shard < plan_.layout.ranks; ++shard) {
        if (shard == plan_.own_shard()) continue;
        coords += plan_.layout.length(shard);
        answered_[shard].each_run(0, plan_.layout.granules(shard),
                                  [&](std::uint32_t first, std::uint32_t last) {
                                      coords -= plan_.layout.coords(shard, first, last);
                                  });
    }
    return coords;
}

std::uint64_t ReceivedMeans::add_to(std::span<float> bucket, Seq user, float factor) {
    settle(user);
    const std::uint64_t coords = values_->add_late(bucket, factor);
    if (coords > 0) user_ = user;
    return coords;
}

void ReceivedMeans::give_back(Seq user) {
    if (user_ != user) return;
    values_->give_back();
    user_.reset();
}

void ReceivedMeans::settle(Seq user) {
    if (!user_ || user_ == user) return;
    values_->settle();
    user_.reset();
}

}  // namespace tailcut
