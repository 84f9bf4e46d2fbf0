#include "protocol/grid/grid_core.hpp"

#include <algorithm>
#include <iterator>
#include <limits>
#include <utility>

#include "codec/centroids.hpp"

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
    settings.carry = false;  // also if a peer's packets have a key
    settings.group_tag = tag_of_line(settings.group_tag, settings.shape.self / length);
    settings.shape.self %= length;
    settings.shape.ranks = length;
    settings.pool_bytes -= settings.pool_bytes / kColumnPoolShare;
    return settings;
}

Settings column_of(Settings settings) {
    const Rank length = row_length_of(settings);
    settings.carry = false;
    settings.group_tag = tag_of_line(settings.group_tag, settings.rows + settings.shape.self % length);
    settings.shape.self /= length;
    settings.shape.ranks = settings.rows;
    settings.pool_bytes /= kColumnPoolShare;
    settings.record_fates = true;  // the row must know what came
    settings.attendance = false;   // a sum stands for many contributions
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

// With how many planes sums travel: the fewest that add less than a tenth to the error of the row's own coding, which is that
// of all contributions but the owner's, and that of the mean. Of the column's sums the owner's is not coded either.
int planes_of_sums(const Terms& terms, Rank row_length, Rank rows) {
    const double row = codec::nominal_noise(terms.scatter.planes) * (row_length - 1) / row_length +
                       codec::nominal_noise(terms.gather.planes);
    int planes = 1;
    while (planes < codec::kMaxPlanes && codec::nominal_noise(planes) * (rows - 1) / rows > row / 10)
        ++planes;
    return planes;
}

// What the column's report says that there is.
RowMean row_mean(const OpReport& report, const ColumnOp& op) {
    const auto granules = static_cast<std::uint32_t>(op.sum.counts.size());
    RowMean mean{GranuleSet(granules), op.sum.values(), &op.mean};
    const Layout layout{report.bucket_len, static_cast<Rank>(report.held.size())};
    for (Rank shard = 0; shard < report.held.size() && layout.length(shard) > 0; ++shard) {
        const auto begin = static_cast<std::uint32_t>(layout.begin(shard) / kGranule);
        for (std::uint32_t g = 0, end, all = layout.granules(shard); g < all; g = end) {
            end = report.held[shard].run_end(g, all);
            if (report.held[shard].test(g)) mean.held.set(begin + g, begin + end);
        }
    }
    if (report.scatter.planes == 0) return mean;
    // This rank's part of the shard is taken for all of it. If there is nothing of it, blocks are taken for Gaussian.
    const Energies& e = report.energies;
    const double measured = e.sent_nominal > 0 ? e.sent_noise / e.sent_nominal : 1;
    mean.sums_noise = codec::nominal_noise(report.scatter.planes) * (layout.ranks - 1) / layout.ranks;
    mean.mean_noise = codec::nominal_noise(report.gather.planes);
    if (e.mean > 0) {
        mean.sums_noise = e.quantized * measured / e.mean;
        mean.mean_noise = e.mean_quantized / e.mean;
        mean.trimmed = e.trimmed / e.mean;
    }
    if (e.received > 0) mean.trimmed += e.received_trimmed / e.received;
    return mean;
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
              make_column_values(column_ops_, settings.codec, settings.elided)) {
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
    terms_.key = 0;           // grids do not carry what is late (rule 9)
    terms_.reliable.clear();  // nor wait for some of a bucket
    row_.submit(now, ticket, bucket, terms_);
    pump(now);
}

// In the column nothing is cut in another way. It is told, so that all rows hear of the epoch.
void GridCore::install(Time now, Epoch epoch) {
    std::vector<std::uint16_t> weights;
    Epoch row{epoch.number, epoch.first_seq, std::nullopt, {}}, column = row;
    for (Rank rank = row_begin_; rank < row_begin_ + row_length_; ++rank) {
        weights.push_back(static_cast<std::uint16_t>(epoch.weights->of_first(rank, 1)));
        row.members.push_back(epoch.members[rank]);
    }
    row.weights.emplace(weights);
    for (std::size_t rank = place_; rank < epoch.members.size(); rank += row_length_)
        column.members.push_back(epoch.members[rank]);
    row_.install(now, std::move(row));
    column_.install(now, std::move(column));
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
    if (op.non_finite() && !elided_) {  // rule 10: it must reach the column, whatever was lost of the values
        sum->values()[0] = std::numeric_limits<float>::quiet_NaN();
        if (sum->counts[0] == 0) sum->counts[0] = 1;
    }
    closed_.emplace_back(op.seq(), ColumnOp{op.layout().bucket_len, std::move(*sum), due, {}});
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
    for (auto& [seq, op] : std::exchange(closed_, {}))
        if (!waiting_.try_emplace(seq, std::move(op)).second)
            put_mean(now, seq, op, nullptr,
                     false);  // of several lengths of one op, the column takes the first
    while (!waiting_.empty()) {
        const Seq seq = waiting_.begin()->first;
        if (seq > column_.ops().next_seq()) {
            if (row_.ops().will_close(column_.ops().next_seq())) break;
            column_.skip_to(seq);  // the row has jumped
        }
        enter_column(now, seq, std::move(waiting_.extract(waiting_.begin()).mapped()));
    }
    skip_unowned();
    close_column();
}

// The column has no ops in which this place owns nothing.
void GridCore::skip_unowned() {
    const auto owns = [&](Seq seq) {
        const OwnerWeights* const weights = row_.epochs().at(seq).owners();
        return !weights || weights->of_first(place_, 1) > 0;
    };
    Seq next = column_.ops().next_seq();
    while (next < row_.ops().next_seq() && !owns(next)) ++next;
    if (next > column_.ops().next_seq()) column_.skip_to(next);
}

void GridCore::enter_column(Time now, Seq seq, ColumnOp op) {
    if (seq < column_.ops().next_seq())
        return put_mean(now, seq, op, nullptr, false);  // the column is far ahead
    column_.resynced();                                 // who contributes is the row's business
    const ColumnOp& entered = column_ops_.insert_or_assign(seq, std::move(op)).first->second;
    column_.submit(now, seq, entered.sum.values(), column_terms(entered.due - now));
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
    terms.scatter.planes = planes_of_sums(terms_, row_length_, column_.ranks());
    return terms;
}

void GridCore::take_means(Time now) {
    for (OpReport& report : std::exchange(column_.reports(), {})) {
        const auto op = column_ops_.extract(static_cast<Seq>(report.ticket));
        const RowMean mean = row_mean(report, op.mapped());
        put_mean(now, op.key(), op.mapped(), &mean, report.non_finite);
        column_reports_.push_back(std::move(report));
    }
}

void GridCore::put_mean(Time now, Seq seq, const ColumnOp& op, const RowMean* mean, bool non_finite) {
    row_.reduce(now, seq, op.bucket_len, non_finite, [&](Reduction& reduction) {
        if (mean)
            dynamic_cast<RowReduction&>(reduction).put_mean(*mean);
        else
            reduction.leave_rest_empty();
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
