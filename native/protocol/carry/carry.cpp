#include "protocol/carry/carry.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <utility>

#include "protocol/values/values.hpp"

namespace tailcut {
namespace {

// The share of earlier ops in what is known of a bucket's correlation: it follows within about ten ops.
constexpr double kMemory = 0.9;

// A stand-in is rounded to such a part of the own gradient, so that the product is exact where values have bits left.
constexpr double kShareSteps = 64;

// A tag is the upper half of the loss scale as fp32 (bfloat16).
float loss_scale_of(std::uint16_t tag) { return std::bit_cast<float>(std::uint32_t{tag} << 16); }

// Values were multiplied by the loss scale of their op, and are added to values of another. A tag may come from a
// header, and one that is no scale must not make an Inf or a NaN of what is carried.
float rescaling(std::uint16_t from, std::uint16_t to) {
    if (from == to || from == 0 || to == 0) return 1;
    const float factor = loss_scale_of(to) / loss_scale_of(from);
    return factor > 0 && factor < std::numeric_limits<float>::infinity() ? factor : 1;
}

// Whether what is late for a shard may enter the mean of this op, which has cut the bucket alike.
bool enters(const LateShard& shard, const Plan& user) {
    return shard.plan().seq != user.seq && shard.plan().bucket.epoch == user.bucket.epoch;
}

}  // namespace

bool OpContext::carries(const Plan& plan) const { return carry.carries(plan); }

Carry::Bucket* Carry::find(const Plan& plan) {
    const auto at = buckets_.find(plan.bucket.key);
    return at != buckets_.end() && at->second.length == plan.bucket.length ? &at->second : nullptr;
}

void Carry::drop(Bucket& bucket) {
    for (const auto& [seq, shard] : bucket.contributions) count_dropped(*shard);
    for (const auto& [seq, means] : bucket.means) count_dropped(means);
    bucket.contributions.clear();
    bucket.means.clear();
}

void Carry::enter(const Plan& plan) {
    if (!carries(plan)) return;
    Bucket& bucket = buckets_[plan.bucket.key];
    if (bucket.length != plan.bucket.length) {
        drop(bucket);
        bucket.length = plan.bucket.length;
        bucket.correlation = {};
    }
    bucket.entered = true;
    for (auto& [seq, shard] : bucket.contributions) shard->settle(plan.seq);
    for (auto& [seq, means] : bucket.means) means.settle(plan.seq);
    std::erase_if(bucket.contributions, [](const auto& entry) { return entry.second->done(); });
    std::erase_if(bucket.means, [](const auto& entry) { return entry.second.done(); });
}

// ---- contributions ----------------------------------------------------------------------------------------

void Carry::await(const OpContext& context, const Plan& plan, std::uint16_t loss_scale_tag,
                  std::uint32_t first, std::uint32_t last, const std::vector<GranuleSet>& arrived,
                  const std::vector<bool>& abstains, std::span<const float> mean) {
    if (plan.layout.length(plan.own_shard()) == 0) return;  // its mean is EMPTY in every op
    const auto missing = [&](Rank rank) { return !abstains[rank] && !arrived[rank].all(first, last); };
    Rank rank = 0;
    while (rank < plan.layout.ranks && !missing(rank)) ++rank;
    if (rank == plan.layout.ranks) return;
    Bucket& bucket = buckets_[plan.bucket.key];
    if (!bucket.entered && bucket.contributions.empty()) bucket.length = plan.bucket.length;
    if (bucket.length != plan.bucket.length) return;
    auto& shard = bucket.contributions[plan.seq];
    if (!shard) shard = context.values.late_shard(context, plan);
    shard->loss_scale_tag = loss_scale_tag;
    while (!shard->await(first, last, arrived, abstains, mean))
        if (!evict() || !late_shard(plan)) return;
}

LateShard* Carry::late_shard(const Plan& plan) {
    Bucket* bucket = find(plan);
    if (!bucket) return nullptr;
    const auto at = bucket->contributions.find(plan.seq);
    return at == bucket->contributions.end() ? nullptr : at->second.get();
}

std::optional<wire::Reject> Carry::contribute(const Plan& plan, const wire::Header& header,
                                              std::span<const std::byte> payload) {
    if (header.empty()) return wire::Reject::kLate;
    for (;;) {
        LateShard* shard = late_shard(plan);
        if (!shard) return wire::Reject::kLate;  // all of it has come, or it is too old
        const auto reason = shard->put(header, payload);
        if (reason == wire::Reject::kPool && evict()) continue;
        const bool comes_again = payload.empty();  // it was trimmed
        if (reason && reason != wire::Reject::kDuplicate && !comes_again)
            counters_.dropped_late_coords += header.count;
        if (!reason && keeps_log_ && payload.size() < wire::stated_payload_bytes(header))
            log_.cuts.push_back({plan.seq, wire::Stage::kScatter, header.source, header.first / kGranule,
                                 (header.count + kGranule - 1u) / kGranule,
                                 static_cast<std::uint32_t>(payload.size()), true});
        return reason;
    }
}

bool Carry::any(const Plan& user, std::uint32_t first, std::uint32_t last) const {
    const Bucket* bucket = carries(user) ? find(user) : nullptr;
    return bucket &&
           std::any_of(bucket->contributions.begin(), bucket->contributions.end(), [&](const auto& entry) {
               return enters(*entry.second, user) && entry.second->any(user.seq, first, last);
           });
}

void Carry::add_to(const Plan& user, std::uint16_t loss_scale_tag, std::uint32_t first, std::uint32_t last,
                   std::span<float> sum) {
    for (auto& [seq, shard] : find(user)->contributions)
        if (enters(*shard, user) && shard->any(user.seq, first, last))
            counters_.carried_contributions +=
                shard->add_to(sum, first, last, user.seq, rescaling(shard->loss_scale_tag, loss_scale_tag));
}

void Carry::hand_over(const Plan& user, std::uint16_t loss_scale_tag, std::span<float> bucket) {
    Bucket* late = carries(user) ? find(user) : nullptr;
    if (!late) return;
    for (auto& [seq, shard] : late->contributions) {
        const Plan& plan = shard->plan();
        const Rank own = plan.own_shard();
        if (plan.bucket.epoch >= user.bucket.epoch || !shard->any(user.seq, 0, plan.layout.granules(own)))
            continue;
        // It weighs as much as in its own epoch.
        const float factor = rescaling(shard->loss_scale_tag, loss_scale_tag) *
                             static_cast<float>(user.members()) / static_cast<float>(plan.members());
        counters_.carried_contributions +=
            shard->add_to(bucket.subspan(plan.layout.begin(own), plan.layout.length(own)), 0,
                          plan.layout.granules(own), user.seq, factor);
    }
}

// ---- means ------------------------------------------------------------------------------------------------

float Carry::stand_in_share(const Plan& plan) const {
    if (!stands_in_) return 0;
    const Bucket* bucket = find(plan);
    // Before anything is known, ranks count as independent.
    if (!bucket || !(bucket->correlation.squares > 0)) return 1.0f / static_cast<float>(plan.layout.ranks);
    const double share = std::clamp(bucket->correlation.product / bucket->correlation.squares, 0.0, 1.0);
    return static_cast<float>(std::round(share * kShareSteps) / kShareSteps);
}

void Carry::learn(const Plan& plan, const Correlation& correlation) {
    Bucket* bucket = find(plan);
    // An own contribution or a mean with an Inf or a NaN tells nothing.
    if (!bucket || !(correlation.squares > 0) || !std::isfinite(correlation.product + correlation.squares))
        return;
    bucket->correlation.product = kMemory * bucket->correlation.product + correlation.product;
    bucket->correlation.squares = kMemory * bucket->correlation.squares + correlation.squares;
}

void Carry::keep(ReceivedMeans means) {
    if (Bucket* bucket = find(means.plan())) bucket->means.emplace(means.plan().seq, std::move(means));
}

std::optional<wire::Reject> Carry::place(Time now, const Plan& plan, const wire::Header& header,
                                         std::span<const std::byte> payload) {
    Bucket* bucket = find(plan);
    if (!bucket) return std::nullopt;
    const auto at = bucket->means.find(plan.seq);
    if (at == bucket->means.end()) return std::nullopt;
    // Others have skipped the op, and this rank has not heard of it in time (rule 10).
    if ((header.flags & wire::kVerdict) && at->second.note_verdict()) ++counters_.split_verdicts;
    return at->second.place(now, header, payload);
}

std::uint64_t Carry::add_means(const Plan& user, std::uint16_t loss_scale_tag, std::span<float> bucket) {
    Bucket* carried = carries(user) ? find(user) : nullptr;
    std::uint64_t coords = 0;
    if (!carried) return coords;
    for (auto& [seq, means] : carried->means) {
        if (keeps_log_)
            means.each_due([&, from = seq](Rank shard, std::uint32_t first, std::uint32_t last) {
                note_use({user.seq, from, wire::Stage::kGather, shard, false, first, last});
            });
        coords += means.add_to(bucket, user.seq, rescaling(means.loss_scale_tag, loss_scale_tag));
    }
    counters_.carried_means += coords;
    return coords;
}

void Carry::forget_means(std::uint32_t key, std::uint64_t first, std::uint64_t last) {
    const auto bucket = buckets_.find(key);
    if (bucket == buckets_.end()) return;
    for (auto& [seq, means] : bucket->second.means) means.forget(first, last);
}

// ---- both -------------------------------------------------------------------------------------------------

void Carry::give_back(Seq user) {
    for (auto& [key, bucket] : buckets_) {
        for (auto& [seq, shard] : bucket.contributions) shard->give_back(user);
        for (auto& [seq, means] : bucket.means) means.give_back(user);
    }
}

void Carry::skip(Seq from, Seq until) {
    for (Seq user = from; user < until; ++user) give_back(user);
    for (auto& [key, bucket] : buckets_) {
        for (auto& [seq, shard] : bucket.contributions)
            if (seq >= from && seq < until) shard->revoke();
        std::erase_if(bucket.contributions, [](const auto& entry) { return entry.second->done(); });
        bucket.means.erase(bucket.means.lower_bound(from), bucket.means.lower_bound(until));
    }
}

void Carry::drop_from(Seq seq) {
    for (auto& [key, bucket] : buckets_) {
        const auto drop = [&](auto& late, const auto& value_of) {
            for (auto at = late.lower_bound(seq); at != late.end(); at = late.erase(at))
                count_dropped(value_of(at->second));
        };
        drop(bucket.contributions, [](const auto& shard) -> const LateShard& { return *shard; });
        drop(bucket.means, [](const auto& means) -> const ReceivedMeans& { return means; });
    }
}

void Carry::drop_all() {
    for (auto& [key, bucket] : buckets_) {
        bucket.contributions.clear();
        bucket.means.clear();
    }
}

void Carry::drop_means() {
    for (auto& [key, bucket] : buckets_) {
        for (const auto& [seq, means] : bucket.means) count_dropped(means);
        bucket.means.clear();
    }
}

void Carry::retire(Seq next_seq) {
    const auto retire_old = [&](auto& late, const auto& value_of) {
        while (!late.empty() && late.begin()->first < next_seq &&
               next_seq - late.begin()->first > late_ops_) {
            count_dropped(value_of(late.begin()->second));
            late.erase(late.begin());
        }
    };
    for (auto at = buckets_.begin(); at != buckets_.end();) {
        Bucket& bucket = at->second;
        retire_old(bucket.contributions, [](const auto& shard) -> const LateShard& { return *shard; });
        retire_old(bucket.means, [](const auto& means) -> const ReceivedMeans& { return means; });
        const bool unknown = !bucket.entered && bucket.contributions.empty();
        at = unknown ? buckets_.erase(at) : std::next(at);
    }
}

bool Carry::evict() {
    Bucket* oldest = nullptr;
    Seq seq = 0;
    for (auto& entry : buckets_) {
        Bucket& bucket = entry.second;
        for (const bool contributions : {true, false}) {
            if (contributions ? bucket.contributions.empty() : bucket.means.empty()) continue;
            const Seq first =
                contributions ? bucket.contributions.begin()->first : bucket.means.begin()->first;
            if (!oldest || first < seq) oldest = &bucket, seq = first;
        }
    }
    if (!oldest) return false;
    note_eviction();
    if (const auto at = oldest->contributions.find(seq); at != oldest->contributions.end()) {
        count_dropped(*at->second);
        oldest->contributions.erase(at);
    }
    if (const auto at = oldest->means.find(seq); at != oldest->means.end()) {
        count_dropped(at->second);
        oldest->means.erase(at);
    }
    return true;
}

LateLog Carry::take_news() {
    const auto since = [](const auto& all, std::size_t& told) {
        const std::size_t from = std::exchange(told, all.size());
        return std::remove_cvref_t<decltype(all)>(all.begin() + static_cast<std::ptrdiff_t>(from), all.end());
    };
    return {since(log_.uses, told_uses_), since(log_.cuts, told_cuts_)};
}

}  // namespace tailcut
