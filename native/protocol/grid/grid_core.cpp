#include "protocol/grid/grid_core.hpp"

#include <algorithm>
#include <iterator>
#include <limits>
#include <utility>

namespace tailcut {
namespace {

// An op has its row's share of bytes in a row and a part of one shard in a column.
constexpr std::size_t kColumnPoolShare = 8;

Rank row_length_of(const Settings& settings) {
    return static_cast<Rank>(settings.shape.ranks / settings.rows);
}

// Groups of one grid must not take each other's packets. `line`: of rows first, then of columns.
std::uint64_t tag_of_line(std::uint64_t group_tag, std::uint32_t line) {
    return mix(mix(group_tag) ^ line) & wire::kTagMask;
}

Settings row_of(Settings settings) {
    const Rank length = row_length_of(settings);
    settings.group_tag = tag_of_line(settings.group_tag, settings.shape.self / length);
    settings.shape.self %= length;
    settings.shape.ranks = length;
    settings.pool_bytes -= settings.pool_bytes / kColumnPoolShare;
    return settings;
}

Settings column_of(Settings settings) {
    const Rank length = row_length_of(settings);
    settings.group_tag = tag_of_line(settings.group_tag, settings.rows + settings.shape.self % length);
    settings.shape.self /= length;
    settings.shape.ranks = settings.rows;
    settings.pool_bytes /= kColumnPoolShare;
    settings.codec = wire::Codec::kRaw;  // sums are few bytes: they travel as they are
    settings.record_fates = true;        // the row must know what came
    return settings;
}

std::vector<PeerSettings> peers_in_row(const Settings& settings, const std::vector<PeerSettings>& peers) {
    const Rank length = row_length_of(settings);
    const auto begin = peers.begin() + settings.shape.self / length * length;
    std::vector<PeerSettings> row(begin, begin + length);
    for (PeerSettings& peer : row) peer.pool_bytes -= peer.pool_bytes / kColumnPoolShare;
    return row;
}

std::vector<PeerSettings> peers_in_column(const Settings& settings, const std::vector<PeerSettings>& peers) {
    const Rank length = row_length_of(settings);
    std::vector<PeerSettings> column;
    for (std::size_t rank = settings.shape.self % length; rank < peers.size(); rank += length) {
        column.push_back(peers[rank]);
        column.back().pool_bytes /= kColumnPoolShare;
    }
    return column;
}

}  // namespace

GridCore::GridCore(const Settings& settings, const std::vector<PeerSettings>& peers)
    : row_length_(row_length_of(settings)),
      row_begin_(static_cast<Rank>(settings.shape.self / row_length_ * row_length_)),
      place_(static_cast<Rank>(settings.shape.self - row_begin_)),
      elided_(settings.elided),
      terms_(settings.terms),
      row_(row_of(settings), peers_in_row(settings, peers), make_row_values(settings.codec, settings.elided),
           this),
      column_(column_of(settings), peers_in_column(settings, peers),
              make_column_values(column_ops_, settings.elided)) {
    column_.expect(column_terms(terms_.bounds.scatter));
}

std::vector<std::uint64_t> GridCore::tags(std::uint64_t group_tag, Rank rank, Rank ranks, Rank rows) {
    Settings settings;
    settings.group_tag = group_tag;
    settings.shape = {rank, ranks, 0};
    settings.rows = rows;
    return {row_of(settings).group_tag, column_of(settings).group_tag};
}

void GridCore::submit(Time now, Ticket ticket, std::span<float> bucket, const Terms& terms) {
    terms_ = terms;
    row_.submit(now, ticket, bucket, terms);
    pump(now);
}

void GridCore::say_goodbye() {
    closing_ = true;
    row_.say_goodbye();
    close_column();
}

// It enters all ops of the row before it says goodbye.
void GridCore::close_column() {
    if (!closing_ || column_closing_ || column_.ops().next_seq() < row_.ops().next_seq()) return;
    column_closing_ = true;
    column_.say_goodbye();
}

void GridCore::abort(Time now) {
    row_.abort(now);
    pump(now);
    column_.abort(now);
    pump(now);
}

void GridCore::leave() {
    row_.leave();
    column_.leave();
}

void GridCore::receive(Time now, std::span<const std::byte> datagram) {
    const bool column = wire::tag_of(datagram) == column_.group_tag();
    (column ? column_ : row_).receive(now, datagram);
    pump(now);
}

std::optional<Rank> GridCore::claimed_source(std::span<const std::byte> datagram) const {
    if (const auto place = row_.claimed_source(datagram)) return static_cast<Rank>(row_begin_ + *place);
    if (const auto row = column_.claimed_source(datagram))
        return static_cast<Rank>(*row * row_length_ + place_);
    return {};
}

// The column first: a row waits for each of its owners.
bool GridCore::transmit(Time now, Outgoing& out) {
    if (column_.transmit(now, out)) {
        out.to = static_cast<Rank>(out.to.rank() * row_length_ + place_);
        return true;
    }
    if (!row_.transmit(now, out)) return false;
    out.to = static_cast<Rank>(out.to.rank() + row_begin_);
    return true;
}

void GridCore::retract(Time now, const Outgoing& out) {
    const bool column = out.header.group_tag == column_.group_tag();
    Outgoing own = out;
    own.to = static_cast<Rank>(column ? out.to.rank() / row_length_ : out.to.rank() - row_begin_);
    (column ? column_ : row_).retract(now, own);
}

void GridCore::advance(Time now) {
    row_.advance(now);
    column_.advance(now);
    pump(now);
}

// Told by the row, which must not be entered from here: pump() carries the sum on.
void GridCore::on_close(Op& op, Time due) {
    auto sum = dynamic_cast<RowReduction&>(op.reduction()).take_sum();
    if (!sum) return;
    // Rule 10: it must reach the column, whatever was lost of the values.
    if (op.non_finite() && !elided_) sum->values()[0] = std::numeric_limits<float>::quiet_NaN();
    closed_.push_back({op.seq(), op.layout().bucket_len, std::move(*sum), due});
}

// Carry what either has ready to the other, until neither has anything.
void GridCore::pump(Time now) {
    do {
        catch_up(now);
        take_sums(now);
        take_means(now);
    } while (!closed_.empty() || !column_.reports().empty());
    if (row_.reports().empty()) return;
    OpReport& latest = row_.reports().back();
    std::move(column_reports_.begin(), column_reports_.end(), std::back_inserter(latest.column));
    column_reports_.clear();
}

// A row that is late would stay so: the means that it waits for are there, but its own SCATTER takes as long as that of
// the others. What it sums is of no use to them any more.
void GridCore::catch_up(Time now) {
    if (column_.ops().overtaken(column_.ops().next_seq())) row_.close(now, column_.ops().next_seq());
}

void GridCore::take_sums(Time now) {
    for (Sum& sum : std::exchange(closed_, {}))
        if (!waiting_.try_emplace(sum.seq, std::move(sum)).second)
            put_mean(now, sum, nullptr);  // of several lengths of one op, the column takes the first
    while (!waiting_.empty()) {
        const Seq seq = waiting_.begin()->first;
        if (seq > column_.ops().next_seq()) {
            if (row_.ops().will_close(column_.ops().next_seq())) break;
            column_.skip_to(seq);  // the row has jumped
        }
        enter_column(now, std::move(waiting_.extract(waiting_.begin()).mapped()));
    }
    close_column();
}

void GridCore::enter_column(Time now, Sum sum) {
    const Seq seq = sum.seq;
    if (seq < column_.ops().next_seq()) return put_mean(now, sum, nullptr);  // the column is far ahead
    column_.resynced();  // who contributes is the row's business
    column_ops_.weights.insert_or_assign(seq, sum.values.weights);
    const Sum& kept = entered_.insert_or_assign(Ticket{seq}, std::move(sum)).first->second;
    column_.submit(now, seq, kept.values.values(), column_terms(kept.due - now));
    column_.expect(column_terms(terms_.bounds.scatter));
}

// With time for other rows, which may have to wait that much longer for their contributions than this one did.
Terms GridCore::column_terms(Duration longer) const {
    Bounds bounds = terms_.column_bounds;
    for (Duration* bound : {&bounds.scatter, &bounds.scatter_cap, &bounds.deadline})
        *bound += std::max<Duration>(0, longer);
    Terms terms = terms_;
    terms.bounds = bounds;
    terms.incast = terms_.column_incast;
    terms.skip_above = 0;  // a row's sum stands for many contributions
    return terms;
}

void GridCore::take_means(Time now) {
    for (OpReport& report : std::exchange(column_.reports(), {})) {
        const auto sum = entered_.extract(report.ticket);
        put_mean(now, sum.mapped(), &report);
        column_ops_.end(report.seq);
        column_reports_.push_back(std::move(report));
    }
}

// Of what the column's report says that there is; without one, of nothing.
void GridCore::put_mean(Time now, const Sum& sum, const OpReport* report) {
    const auto granules = static_cast<std::uint32_t>(sum.values.weights.size());
    GranuleSet held(granules);
    std::vector<std::uint8_t> planes(granules);
    const Layout layout{report ? report->bucket_len : 0, column_.ranks()};
    for (Rank shard = 0; report && shard < report->held.size() && layout.length(shard) > 0; ++shard) {
        const auto begin = static_cast<std::uint32_t>(layout.begin(shard) / kGranule);
        for (std::uint32_t g = 0, end, all = layout.granules(shard); g < all; g = end) {
            end = report->held[shard].run_end(g, all);
            if (!report->held[shard].test(g)) continue;
            held.set(begin + g, begin + end);
            std::fill(planes.begin() + begin + g, planes.begin() + begin + end,
                      column_ops_.planes_of(report->seq, shard));
        }
    }
    row_.reduce(now, sum.seq, sum.bucket_len, report && report->non_finite, [&](Reduction& reduction) {
        dynamic_cast<RowReduction&>(reduction).put_mean(sum.values.values(), held, planes);
    });
}

Counters GridCore::counters() const {
    Counters counters = row_.counters();
    counters += column_.counters();
    return counters;
}

Duration GridCore::rtt(Rank rank) const {
    if (rank / row_length_ == row_begin_ / row_length_) return row_.rtt(static_cast<Rank>(rank - row_begin_));
    return rank % row_length_ == place_ ? column_.rtt(static_cast<Rank>(rank / row_length_)) : 0;
}

}  // namespace tailcut
