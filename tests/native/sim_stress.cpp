// Random fault schedules through the simulated network. Every schedule is a seed:
//
//   sim_stress [SEEDS = 300] [FIRST = 1]
//
// Whatever the faults, each op of a living rank is reported once and in time, and each granule of a result is
// the rank-order mean of contributions, the same at every rank that holds it, or zero. Without faults, the
// mean is that of all ranks. The mean is computed here once more, in plain loops.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "drivers/simnet.hpp"
#include "protocol/ops/layout.hpp"
#include "sim/baseline.hpp"

namespace {

using namespace tailcut;

constexpr Duration kSecond = 1000 * kMillisecond;
constexpr unsigned kAllowedSeconds = 60;  // of real time for one seed: longer means an endless loop

// Thrown by a check to end the seed.
struct Broken : std::runtime_error {
    using std::runtime_error::runtime_error;
};

template <typename... Parts>
std::string text(const Parts&... parts) {
    std::string all;
    const auto add = [&](const auto& part) {
        if constexpr (std::is_arithmetic_v<std::decay_t<decltype(part)>>)
            all += std::to_string(part);
        else
            all += part;
    };
    (add(parts), ...);
    return all;
}

template <typename... Parts>
void must(bool holds, const Parts&... parts) {
    if (!holds) throw Broken(text(parts...));
}

class Dice {
public:
    explicit Dice(std::uint64_t seed) : seed_(mix(seed)) {}

    std::uint64_t bits() { return mix(seed_ ^ mix(throws_++)); }
    std::uint32_t below(std::uint32_t limit) { return static_cast<std::uint32_t>(bits() % limit); }
    double unit() { return static_cast<double>(bits() >> 11) * 0x1p-53; }
    bool chance(double p) { return unit() < p; }
    Duration between(Duration low, Duration high) {
        return low + static_cast<Duration>(unit() * static_cast<double>(high - low));
    }
    template <typename T>
    T one_of(std::initializer_list<T> choices) {
        return choices.begin()[below(static_cast<std::uint32_t>(choices.size()))];
    }
    Rank rank(const SimSpec& spec) { return static_cast<Rank>(below(spec.ranks)); }

private:
    const std::uint64_t seed_;
    std::uint64_t throws_ = 0;
};

using Buckets = std::vector<std::vector<std::vector<float>>>;  // [op of the program][rank]

struct Plan {
    SimSpec spec;
    Buckets inputs;
    bool clean = true;  // nothing may be lost
    bool even = true;   // all ranks do the same ops
};

// ---- making a plan ----------------------------------------------------------------------------------------

void plan_hosts(Dice& dice, Plan& plan) {
    SimSpec& spec = plan.spec;
    spec.ranks = static_cast<Rank>(1 + dice.below(8));
    spec.depth = 1 + dice.below(4);
    spec.window_ops = dice.one_of<Seq>({1, 2, 3, 8, 64});
    spec.pool_bytes = dice.one_of<std::size_t>({0, 1 << 14, 1 << 17, 1 << 20, 1 << 24});
    spec.socket_buffer_bytes = dice.one_of<std::uint32_t>({1 << 14, 1 << 17, 1 << 20});
    spec.limits.payload_bytes = dice.one_of<std::uint32_t>({256, 1280, 8704, 61'184});
    if (dice.chance(0.4)) {
        spec.codec = wire::Codec::kPlanes;
        spec.limits.trim_payload_bytes = dice.one_of<std::uint32_t>({0, 38, 166});
        for (Rank rank = 0; rank < spec.ranks; ++rank)
            spec.planes_by_rank.push_back(dice.chance(0.5) ? 16 : static_cast<int>(1 + dice.below(16)));
        spec.terms.scatter.whole = spec.terms.gather.whole = dice.chance(0.3);
    }
    spec.terms.skip_above = dice.chance(0.2) ? 0.05f : 0.0f;
    spec.first_seq = dice.one_of<Seq>({0, 0, 1000, 0xFFFFFFF0});
    spec.record = true;
    spec.resend = dice.chance(0.6);
    spec.paced = dice.chance(0.6);
    if (spec.ranks % 2 == 0 && spec.ranks > 2 && dice.chance(0.4))
        spec.rows = dice.chance(0.5) ? 2 : spec.ranks / 2;
    if (spec.rows > 1 && !spec.planes_by_rank.empty())  // every row must encode the same mean
        spec.planes_by_rank.assign(spec.ranks, spec.planes_by_rank[0]);
    spec.multicast = spec.rows == 1 && dice.chance(0.4);
    if (dice.chance(0.3)) spec.deaf.push_back(dice.rank(spec));
    const Seq ops = 1 + dice.below(7);
    spec.ops_by_rank.assign(spec.ranks, ops);
    plan.even = !dice.chance(0.2);
    for (Seq& own : spec.ops_by_rank)
        if (!plan.even) own = dice.below(ops + 1);
    spec.compute.resize(ops);
    for (auto& op : spec.compute)
        for (Rank rank = 0; rank < spec.ranks; ++rank) op.push_back(dice.between(0, 2 * kMillisecond));
}

void plan_lengths(Dice& dice, Plan& plan, bool mismatches) {
    const SimSpec& spec = plan.spec;
    plan.inputs.resize(spec.compute.size());
    for (auto& op : plan.inputs) {
        const auto draw = [&] {
            return dice.one_of<std::uint32_t>({0, 1, 63, 64, 65, 127, 3000, dice.below(20'000)});
        };
        const std::uint32_t length = draw();
        for (Rank rank = 0; rank < spec.ranks; ++rank)
            op.emplace_back(mismatches && dice.chance(0.15) ? draw() : length);
    }
}

void plan_values(Dice& dice, Plan& plan) {
    for (auto& op : plan.inputs)
        for (auto& bucket : op) {
            for (float& value : bucket) value = static_cast<float>(dice.unit() - 0.5);
            if (!bucket.empty() && dice.chance(0.02))
                bucket[dice.below(static_cast<std::uint32_t>(bucket.size()))] =
                    std::numeric_limits<float>::infinity();
        }
}

// Nothing is lost, but packets are late, duplicated, overtaken and queued, and everybody has time to wait.
void plan_clean(Dice& dice, SimSpec& spec) {
    spec.window_ops = std::max(spec.window_ops, 2 * spec.depth);
    spec.terms.bounds = {20 * kSecond, 30 * kSecond, 60 * kSecond, 60 * kSecond, 60 * kSecond, 60 * kSecond};
    spec.terms.column_bounds = spec.terms.bounds;
    spec.linger = 300 * kSecond;
    if (dice.chance(0.5)) spec.jitter = dice.between(0, kMillisecond);
    if (dice.chance(0.3)) spec.duplicate = 0.1;
    if (dice.chance(0.5)) spec.bytes_per_s = dice.one_of<double>({1e7, 1e9});
}

void plan_stops(Dice& dice, SimSpec& spec) {
    for (int freezes = dice.chance(0.3) ? 2 : 0; freezes > 0; --freezes) {
        const Time from = dice.between(0, 60 * kMillisecond);
        spec.freezes.push_back({dice.rank(spec), from, from + dice.between(0, 300 * kMillisecond)});
    }
    if (dice.chance(0.2))
        spec.freezes.push_back({dice.rank(spec), dice.between(0, 60 * kMillisecond), kNever});
    if (dice.chance(0.2)) {
        const Time from = dice.between(0, 60 * kMillisecond);
        Partition partition{from, from + dice.between(0, 100 * kMillisecond), {}};
        for (Rank rank = 0; rank < spec.ranks; ++rank)
            if (dice.chance(0.5)) partition.side.push_back(rank);
        spec.partitions.push_back(std::move(partition));
    }
}

void plan_faults(Dice& dice, SimSpec& spec) {
    const Duration scatter = dice.between(kMillisecond, 20 * kMillisecond);
    const Duration deadline = scatter + dice.between(0, 60 * kMillisecond);
    spec.terms.bounds = {scatter, scatter + dice.between(0, 20 * kMillisecond), deadline, deadline, deadline,
                         deadline};
    if (dice.chance(0.3)) spec.terms.bounds.gather = dice.between(0, 20 * kMillisecond);
    if (dice.chance(0.3)) spec.terms.bounds.scatter_grace = dice.between(0, 5 * kMillisecond);
    if (dice.chance(0.3)) spec.terms.bounds.gather_grace = dice.between(0, 5 * kMillisecond);
    if (dice.chance(0.3)) spec.terms.incast = static_cast<std::uint8_t>(dice.below(spec.ranks));
    spec.terms.column_bounds = spec.terms.bounds;
    if (dice.chance(0.5)) spec.terms.column_bounds.deadline = dice.between(0, 20 * kMillisecond);
    spec.linger = dice.between(0, 200 * kMillisecond);
    if (dice.chance(0.4)) spec.loss = dice.one_of<double>({0.01, 0.1, 0.6});
    if (dice.chance(0.3)) spec.duplicate = dice.unit();
    if (dice.chance(0.3)) spec.corrupt = 0.3 * dice.unit();
    if (dice.chance(0.3)) spec.trim = dice.unit();
    if (dice.chance(0.3)) spec.jitter = dice.between(0, 10 * kMillisecond);
    if (dice.chance(0.5)) spec.bytes_per_s = dice.one_of<double>({1e6, 1e7, 1e8});
    if (dice.chance(0.3)) spec.queue_bytes = 2'000 + dice.below(60'000);
    if (dice.chance(0.2))
        spec.rate_changes.push_back({dice.between(0, 20 * kMillisecond), dice.rank(spec), 1, 0.1});
    for (auto& op : spec.compute)  // stragglers
        for (Duration& compute : op)
            if (dice.chance(0.1)) compute += dice.between(0, 100 * kMillisecond);
    if (dice.chance(0.3)) spec.resync_before.assign(spec.ranks, dice.below(7));
    if (dice.chance(0.3)) spec.skips = {1, 4};
    if (dice.chance(0.3))
        for (std::size_t op = 0; op < spec.compute.size(); ++op)
            spec.loss_scale_tags.push_back(dice.one_of<std::uint16_t>({0, 0x3f80, 0x4000, 0x4040, 0x7fff}));
    plan_stops(dice, spec);
}

// What makes a network uneven: background traffic, links that slow down, losses in a row, two sites.
void plan_network(Dice& dice, sim::NetworkSpec& spec, Rank ranks) {
    if (dice.chance(0.2)) spec.bursty_loss = {0.05 * dice.unit(), 0.05 + 0.5 * dice.unit(), dice.unit()};
    if (dice.chance(0.2))
        spec.bursts = {dice.below(100'000), dice.one_of<double>({0, 1e7}), 1500,
                       dice.between(kMillisecond, 9 * kMillisecond), dice.between(0, 9 * kMillisecond)};
    for (int changes = dice.chance(0.2) ? 3 : 0; changes > 0; --changes)
        spec.rate_changes.push_back(
            {dice.between(0, 60 * kMillisecond),
             dice.chance(0.5) ? sim::RateChange::kAll : static_cast<Rank>(dice.below(ranks)),
             0.1 + dice.unit(), 0.1 + dice.unit()});
    if (dice.chance(0.2))
        spec.wan = {static_cast<Rank>(dice.below(ranks + 1)), dice.one_of<double>({0, 1e7}),
                    dice.between(0, 5 * kMillisecond), 0.1 * dice.unit(),
                    dice.one_of<std::uint64_t>({0, 20'000})};
}

Plan make_plan(std::uint64_t seed) {
    Dice dice(seed);
    Plan plan;
    plan.spec.seed = seed;
    plan.clean = dice.chance(0.4);
    plan_hosts(dice, plan);
    plan_lengths(dice, plan, !plan.clean && dice.chance(0.3));
    plan_values(dice, plan);
    if (plan.clean)
        plan_clean(dice, plan.spec);
    else
        plan_faults(dice, plan.spec);
    if (!plan.clean) plan_network(dice, plan.spec, plan.spec.ranks);
    return plan;
}

// ---- the oracle -------------------------------------------------------------------------------------------

bool same(float a, float b) {
    return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b) ||
           (std::isnan(a) && std::isnan(b));
}

// What every rank put into one op of the group, by seq.
struct Entry {
    const std::vector<float>* input = nullptr;  // null: it never entered
    const std::vector<float>* result = nullptr;
    const OpReport* report = nullptr;  // null: it died in the op
};
using Entries = std::vector<Entry>;  // by rank

float mean_of(const Entries& entries, std::uint32_t ranks, std::size_t at) {
    float sum = 0;
    int count = 0;
    for (std::size_t rank = 0; rank < entries.size(); ++rank)
        if (ranks >> rank & 1) {
            const float value = (*entries[rank].input)[at];
            sum = count++ == 0 ? value : sum + value;
        }
    return sum / static_cast<float>(count);
}

// One op of the group, as seen by all its ranks.
class Oracle {
public:
    Oracle(const Plan& plan, Seq seq, const Entries& entries) : plan_(plan), seq_(seq), entries_(entries) {}

    void check() {
        for (Rank rank = 0; rank < entries_.size(); ++rank) {
            const OpReport* report = entries_[rank].report;
            if (!report || report->status == Status::kLengthMismatch) continue;
            if (plan_.spec.rows > 1)
                check_grid(rank, *report);
            else if (plan_.spec.codec == wire::Codec::kRaw)
                check_rank(rank, *report);
            else
                check_planes(rank, *report);
        }
    }

private:
    void check_rank(Rank rank, const OpReport& report) {
        const Layout layout{report.bucket_len, plan_.spec.ranks};
        for (Rank shard = 0; shard < plan_.spec.ranks; ++shard)
            for (std::uint32_t g = 0; g < layout.granules(shard); ++g)
                check_granule(rank, report, layout, shard, g);
    }

    // Planes mix the coordinates of a block, and the Python tests compare their values with the means. Here
    // only two properties are checked: no value comes out of nowhere, and all ranks that lack nothing have
    // the same bits.
    void check_planes(Rank rank, const OpReport& report) {
        const std::vector<float>& result = *entries_[rank].result;
        must(report.non_finite || std::all_of(result.begin(), result.end(),
                                              [](float value) { return std::fabs(value) < 1e4f; }),
             "seq ", seq_, " rank ", rank, ": a value that nobody sent");
        // What is still on its way from an owner that has said goodbye counts as EMPTY too.
        if (plan_.spec.trim > 0 || report.status != Status::kComplete || report.non_finite ||
            report.gather.missing > 0 || report.gather.empty > 0)
            return;
        const auto [known, fresh] = complete_.try_emplace(report.bucket_len, &result);
        must(fresh || *known->second == result, "seq ", seq_, " rank ", rank,
             ": complete, and unlike another");
    }

    // The sums of rows do not add up in rank order, so their means are not computed here; the Python tests do
    // that.
    void check_grid(Rank rank, const OpReport& report) {
        check_planes(rank, report);
        if (plan_.spec.codec != wire::Codec::kRaw || report.status == Status::kBehind) return;
        const std::vector<float>& result = *entries_[rank].result;
        for (std::size_t at = report.non_finite; at < result.size();
             at += at < kGranule ? kGranule - at : kGranule) {
            if (same(result[at], 0)) continue;  // this coordinate did not come
            const auto [known, fresh] = held_.try_emplace({report.bucket_len, at / kGranule, 0}, result[at]);
            must(fresh || at == report.non_finite || same(known->second, result[at]), "seq ", seq_, " rank ",
                 rank, ": coordinate ", at, " differs between ranks");
        }
    }

    void check_granule(Rank rank, const OpReport& report, const Layout& layout, Rank shard, std::uint32_t g) {
        const std::uint64_t first = layout.begin(shard) + g * kGranule;
        const std::uint64_t last = first + layout.coords(shard, g, g + 1);
        const std::vector<float>& result = *entries_[rank].result;
        const std::uint64_t from = first + (first == 0 && report.non_finite);  // rule 10 puts a NaN there
        if (from >= last) return;
        const std::span<const float> values(result.data() + from, last - from);
        if (!report.held[shard].test(g)) {
            must(std::all_of(values.begin(), values.end(), [](float v) { return same(v, 0.0f); }), "seq ",
                 seq_, " rank ", rank, ": a granule of shard ", shard, " that did not come is not zero");
            return;
        }
        const std::optional<std::uint32_t> ranks = contributors(layout, shard, g);
        const bool right = ranks ? is_mean(*ranks, values, from) : is_some_mean(layout, values, from);
        must(right, "seq ", seq_, " rank ", rank, ": shard ", shard, " granule ", g,
             ranks ? " is not the mean of what its owner reports" : " is no mean of contributions");
        const auto [known, fresh] =
            held_.try_emplace({layout.bucket_len, first / kGranule, shard}, values.back());
        must(fresh || same(known->second, values.back()), "seq ", seq_, " rank ", rank, ": shard ", shard,
             " granule ", g, " differs between ranks");
    }

    // The ranks whose values are in the mean, according to the owner; nothing if it has not told.
    std::optional<std::uint32_t> contributors(const Layout& layout, Rank shard, std::uint32_t g) const {
        const Shape shape{0, plan_.spec.ranks, plan_.spec.seed};
        const OpReport* owner = entries_[tailcut::Plan(shape, seq_, {}).owner(shard)].report;
        if (!owner || owner->contributions.empty() || owner->bucket_len != layout.bucket_len)
            return std::nullopt;
        std::uint32_t ranks = 0;
        for (Rank rank = 0; rank < plan_.spec.ranks; ++rank)
            ranks |= std::uint32_t{owner->contributions[rank].test(g)} << rank;
        return ranks;
    }

    bool eligible(std::uint32_t ranks, const Layout& layout) const {
        for (std::size_t rank = 0; rank < entries_.size(); ++rank)
            if (ranks >> rank & 1 &&
                (!entries_[rank].input || entries_[rank].input->size() != layout.bucket_len))
                return false;
        return ranks != 0;
    }

    bool is_mean(std::uint32_t ranks, std::span<const float> values, std::uint64_t from) const {
        if (ranks == 0) return false;
        for (std::size_t k = 0; k < values.size(); ++k)
            if (!same(values[k], mean_of(entries_, ranks, from + k))) return false;
        return true;
    }

    bool is_some_mean(const Layout& layout, std::span<const float> values, std::uint64_t from) {
        if (eligible(guess_, layout) && is_mean(guess_, values, from)) return true;
        for (guess_ = 1; guess_ < 1u << plan_.spec.ranks; ++guess_)
            if (eligible(guess_, layout) && is_mean(guess_, values, from)) return true;
        return false;
    }

    struct Place {
        std::uint32_t bucket_len;
        std::uint64_t granule;
        Rank shard;
        auto operator<=>(const Place&) const = default;
    };
    const Plan& plan_;
    const Seq seq_;
    const Entries& entries_;
    std::map<Place, float> held_;                                  // the first rank's value
    std::map<std::uint32_t, const std::vector<float>*> complete_;  // by length: the first rank's result
    std::uint32_t guess_ = 1;  // the set of ranks that fitted last: neighbours mostly agree
};

// ---- checks -----------------------------------------------------------------------------------------------

bool dies(const SimSpec& spec, Rank rank) {
    return std::any_of(spec.freezes.begin(), spec.freezes.end(),
                       [&](const Freeze& freeze) { return freeze.rank == rank && freeze.until == kNever; });
}

bool frozen_between(const SimSpec& spec, Rank rank, Time from, Time until) {
    return std::any_of(spec.freezes.begin(), spec.freezes.end(), [&](const Freeze& freeze) {
        return freeze.rank == rank && freeze.from <= until && freeze.until > from;
    });
}

void check_reports(const Plan& plan, const SimResult& result) {
    const SimSpec& spec = plan.spec;
    for (Rank rank = 0; rank < spec.ranks; ++rank) {
        std::vector<int> seen(spec.ops_by_rank[rank]);
        for (const OpReport& report : result.reports[rank]) {
            must(report.ticket < seen.size() && ++seen[report.ticket] == 1, "rank ", rank, ": ticket ",
                 report.ticket, " was reported twice");
            if (report.status == Status::kSeqExhausted) continue;
            const Time due = report.entered_at + spec.terms.bounds.deadline;
            must(report.ended_at <= due || frozen_between(spec, rank, report.entered_at, due), "rank ", rank,
                 " op ", report.ticket, ": ended after its deadline");
        }
        if (dies(spec, rank)) continue;
        must(std::count(seen.begin(), seen.end(), 1) == static_cast<std::ptrdiff_t>(seen.size()), "rank ",
             rank, ": an op was never reported");
        must(result.closed_at[rank] != kNever, "rank ", rank, ": never closed");
    }
}

void check_counters(const Plan& plan, const SimResult& result) {
    for (const Counters& counters : result.counters) {
        const std::uint64_t late_contributions =
            counters.rejected[static_cast<std::size_t>(wire::Reject::kLate)];
        must(late_contributions <= counters.traffic.late_packets, "a late contribution that is not late");
        std::uint64_t rejected = counters.traffic.late_packets - late_contributions;
        for (const std::uint64_t n : counters.rejected) rejected += n;
        must(rejected <= counters.traffic.received_packets, "more packets rejected than received");
    }
    if (plan.spec.freezes.empty())
        must(result.network.fates[static_cast<std::size_t>(SimFate::kSocketDrop)] == 0,
             "a socket that is read dropped packets");
}

// Nothing was lost, so everything must have come: directly to where it belongs, and without overrunning the
// pool.
void check_clean(const Plan& plan, const SimResult& result) {
    const SimSpec& spec = plan.spec;
    const Seq common = *std::min_element(spec.ops_by_rank.begin(), spec.ops_by_rank.end());
    Time last = 0;
    for (Rank rank = 0; rank < spec.ranks; ++rank)
        for (const OpReport& report : result.reports[rank]) {
            last = std::max(last, report.ended_at);
            if (report.status == Status::kSeqExhausted) continue;
            must(report.status == Status::kComplete, "rank ", rank, " op ", report.ticket, ": status ",
                 static_cast<int>(report.status), " without a fault");
            if (report.ticket >= common) continue;
            must(report.scatter.missing + report.gather.missing + report.gather.empty == 0, "rank ", rank,
                 " op ", report.ticket, ": something is missing without a fault");
        }
    for (Rank rank = 0; rank < spec.ranks; ++rank)
        must(result.closed_at[rank] <= last + spec.linger / 2, "rank ", rank,
             ": lingered with nothing left to serve");
    for (const Counters& counters : result.counters) {
        // Multicast also reaches ranks that have no room yet; they get the packet again by unicast.
        must(spec.multicast || counters.rejected[static_cast<std::size_t>(wire::Reject::kPool)] == 0,
             "the pool was overrun");
        must(counters.evicted_shards == 0, "a shard was evicted");
    }
}

void check_non_finite(const Plan& plan, Rank rank, const OpReport& report, const std::vector<float>& result) {
    const auto& op = plan.inputs[report.ticket];
    const bool stated = std::any_of(op.begin(), op.end(), [](const std::vector<float>& input) {
        return std::any_of(input.begin(), input.end(), [](float value) { return !std::isfinite(value); });
    });
    must(report.non_finite == stated, "rank ", rank, " op ", report.ticket, ": rule 10");
    must(!stated || result.empty() || std::isnan(result[0]), "rank ", rank, " op ", report.ticket,
         ": no NaN to be found");
}

// The ops of the group by seq. A rank that died left no report, so its seq follows from its op unless it
// jumped.
std::map<Seq, Entries> by_seq(const Plan& plan, const SimResult& result, const Buckets& results) {
    const SimSpec& spec = plan.spec;
    std::map<Seq, Entries> ops;
    const auto entry = [&](Seq seq, Rank rank) -> Entry& {
        return ops.try_emplace(seq, Entries(spec.ranks)).first->second[rank];
    };
    for (Rank rank = 0; rank < spec.ranks; ++rank) {
        std::vector<bool> reported(spec.ops_by_rank[rank]);
        bool jumped = false;
        for (const OpReport& report : result.reports[rank]) {
            reported[report.ticket] = true;
            jumped |= report.status == Status::kBehind;
            if (report.links.empty()) continue;  // refused: it never entered
            entry(report.seq, rank) = {&plan.inputs[report.ticket][rank], &results[report.ticket][rank],
                                       &report};
        }
        for (Seq op = 0; op < reported.size() && !jumped; ++op)
            if (!reported[op]) entry(spec.first_seq + op, rank).input = &plan.inputs[op][rank];
    }
    return ops;
}

SimResult simulate_plan(const Plan& plan, Buckets& buckets) {
    std::vector<std::vector<std::span<float>>> spans(buckets.size());
    for (std::size_t op = 0; op < buckets.size(); ++op)
        spans[op].assign(buckets[op].begin(), buckets[op].end());
    return simulate(plan.spec, spans);
}

// A reliable transport delivers despite all faults, so everybody ends every op.
void run_baseline(std::uint64_t seed) {
    Dice dice(~seed);
    sim::BaselineSpec spec;
    spec.seed = seed;
    spec.ranks = static_cast<Rank>(1 + dice.below(9));
    spec.algorithm = dice.chance(0.5) ? sim::Algorithm::kRing : sim::Algorithm::kTree;
    spec.bucket_bytes = dice.one_of<std::uint64_t>({0, 1, 1000, dice.below(200'000)});
    spec.part_bytes = 1 + dice.below(50'000);
    spec.transport.segment_bytes = dice.one_of<std::uint32_t>({500, 1448, 8948});
    spec.transport.receive_buffer_bytes = dice.one_of<std::uint64_t>({9000, 100'000, 6 << 20});
    if (dice.chance(0.4)) spec.loss = dice.one_of<double>({0.01, 0.1, 0.3});
    if (dice.chance(0.3)) spec.duplicate = 0.3 * dice.unit();
    if (dice.chance(0.3)) spec.corrupt = 0.1 * dice.unit();
    if (dice.chance(0.3)) spec.jitter = dice.between(0, 10 * kMillisecond);
    if (dice.chance(0.6)) spec.bytes_per_s = dice.one_of<double>({1e6, 1e7, 1e9});
    if (dice.chance(0.3)) spec.queue_bytes = 20'000 + dice.below(60'000);
    plan_network(dice, spec, spec.ranks);
    spec.bursty_loss.loss *= 0.5;
    if (spec.bytes_per_s > 0)  // a link that others fill forever delivers nothing
        spec.bursts.bytes =
            std::min(spec.bursts.bytes, static_cast<std::uint64_t>(0.04e-9 * spec.bytes_per_s *
                                                                   static_cast<double>(spec.bursts.gap_min)));
    const std::size_t ops = 1 + dice.below(4);
    for (std::size_t op = 0; op < ops; ++op) {
        auto& row = spec.compute.emplace_back();
        for (Rank rank = 0; rank < spec.ranks; ++rank) row.push_back(dice.between(0, 5 * kMillisecond));
    }
    for (int freezes = dice.chance(0.3) ? 2 : 0; freezes > 0; --freezes) {
        const Time from = dice.between(0, 60 * kMillisecond);
        spec.freezes.push_back(
            {static_cast<Rank>(dice.below(spec.ranks)), from, from + dice.between(0, kSecond)});
    }
    spec.give_up = 3000 * kSecond;
    const sim::BaselineResult result = sim::simulate_baseline(spec);
    must(result.ops.size() == ops * spec.ranks, "baseline: ", result.ops.size(), " of ", ops * spec.ranks,
         " ops ended");
    std::vector<std::uint32_t> next(spec.ranks);
    for (const sim::BaselineOp& op : result.ops)
        must(op.op == next[op.rank]++ && op.ended_at >= op.entered_at, "baseline: rank ", op.rank,
             " out of order");
}

// Ops of buckets with keys carry what is late, so that their results are not means of their own contributions alone.
void run_carried(const Plan& plan) {
    Plan keyed = plan;
    keyed.spec.buckets = plan.spec.depth + plan.spec.seed % 3;
    for (int again = 0; again < 4; ++again) {  // late parts need later ops
        std::copy_n(plan.inputs.begin(), plan.inputs.size(), std::back_inserter(keyed.inputs));
        std::copy_n(plan.spec.compute.begin(), plan.spec.compute.size(),
                    std::back_inserter(keyed.spec.compute));
        std::copy_n(plan.spec.loss_scale_tags.begin(), plan.spec.loss_scale_tags.size(),
                    std::back_inserter(keyed.spec.loss_scale_tags));
        for (Rank rank = 0; rank < plan.spec.ranks; ++rank)
            keyed.spec.ops_by_rank[rank] += plan.spec.ops_by_rank[rank];
    }
    Buckets results = keyed.inputs;
    const SimResult result = simulate_plan(keyed, results);
    check_reports(keyed, result);
    check_counters(keyed, result);
    for (Rank rank = 0; rank < keyed.spec.ranks; ++rank)
        for (const OpReport& report : result.reports[rank])
            for (const float value : results[report.ticket][rank])
                must(report.non_finite || is_error(report.status) || std::isfinite(value), "rank ", rank,
                     " op ", report.ticket, ": not finite, and not said");
    Buckets again = keyed.inputs;
    const SimResult second = simulate_plan(keyed, again);
    must(second.events == result.events, "a second carried run went differently");
    for (std::size_t op = 0; op < results.size(); ++op)
        for (Rank rank = 0; rank < keyed.spec.ranks; ++rank)
            must(
                std::equal(results[op][rank].begin(), results[op][rank].end(), again[op][rank].begin(), same),
                "op ", op, " rank ", rank, ": a second carried run gave other values");
}

void run(std::uint64_t seed) {
    const Plan plan = make_plan(seed);
    Buckets results = plan.inputs;
    const SimResult result = simulate_plan(plan, results);
    check_reports(plan, result);
    check_counters(plan, result);
    if (plan.clean) check_clean(plan, result);
    for (const auto& [seq, entries] : by_seq(plan, result, results)) Oracle(plan, seq, entries).check();
    if (plan.clean && plan.even)
        for (Rank rank = 0; rank < plan.spec.ranks; ++rank)
            for (const OpReport& report : result.reports[rank])
                if (report.status == Status::kComplete)
                    check_non_finite(plan, rank, report, results[report.ticket][rank]);
    if (seed % 8 == 0) {  // the same seed must give the same history
        Buckets again = plan.inputs;
        const SimResult second = simulate_plan(plan, again);
        must(second.events == result.events && second.ended_at == result.ended_at,
             "a second run went differently");
    }
    if (seed % 8 == 1 && plan.spec.codec == wire::Codec::kRaw) {
        Plan elided = plan;
        elided.spec.elided = true;
        Buckets zeros = plan.inputs;
        for (auto& op : zeros)
            for (auto& bucket : op) std::fill(bucket.begin(), bucket.end(), 0.0f);
        const SimResult second = simulate_plan(elided, zeros);
        must(second.events == result.events && second.ended_at == result.ended_at,
             "without values it went differently");
    }
    run_carried(plan);
    run_baseline(seed);
}

const char* program = "sim_stress";
volatile std::uint64_t running_seed = 0;

void reproduce(std::uint64_t seed) {
    std::printf("    alone: %s 1 %llu\n", program, static_cast<unsigned long long>(seed));
}

void on_alarm(int) {
    std::printf("seed %llu: still running after %u s\n", static_cast<unsigned long long>(running_seed),
                kAllowedSeconds);
    reproduce(running_seed);
    std::fflush(stdout);
    _exit(1);
}

}  // namespace

int main(int argc, char** argv) {
    const std::uint64_t seeds = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 300;
    const std::uint64_t first = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
    program = argv[0];
    ::signal(SIGALRM, on_alarm);
    std::uint64_t failed = 0;
    for (std::uint64_t seed = first; seed < first + seeds; ++seed) {
        running_seed = seed;
        ::alarm(kAllowedSeconds);
        try {
            run(seed);
        } catch (const Broken& broken) {
            ++failed;
            std::printf("seed %llu: %s\n", static_cast<unsigned long long>(seed), broken.what());
            reproduce(seed);
        }
    }
    std::printf("%llu passed, %llu failed\n", static_cast<unsigned long long>(seeds - failed),
                static_cast<unsigned long long>(failed));
    return failed == 0 ? 0 : 1;
}
