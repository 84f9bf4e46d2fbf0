#include "protocol/grid.hpp"

#include <algorithm>
#include <iterator>
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
    if (settings.rows == 1) return settings;
    const Rank length = row_length_of(settings);
    settings.group_tag = tag_of_line(settings.group_tag, settings.shape.self / length);
    settings.shape.self %= length;
    settings.shape.ranks = length;
    settings.pool_bytes -= settings.pool_bytes / kColumnPoolShare;
    settings.level = Level::kRow;
    return settings;
}

Settings column_of(Settings settings) {
    const Rank length = row_length_of(settings);
    settings.group_tag = tag_of_line(settings.group_tag, settings.rows + settings.shape.self % length);
    settings.shape.self /= length;
    settings.shape.ranks = settings.rows;
    settings.pool_bytes /= kColumnPoolShare;
    settings.level = Level::kColumn;
    settings.codec = wire::Codec::kRaw;  // sums are few bytes: they travel as they are
    settings.record_fates = true;        // the row must know what came
    return settings;
}

std::vector<PeerSettings> peers_in_row(const Settings& settings, const std::vector<PeerSettings>& peers) {
    if (settings.rows == 1) return peers;
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

GranuleSet none_of(const Sums& sums) { return GranuleSet(static_cast<std::uint32_t>(sums.weights.size())); }

}  // namespace

Grid::Grid(const Settings& settings, const std::vector<PeerSettings>& peers)
    : row_length_(row_length_of(settings)),
      row_begin_(static_cast<Rank>(settings.shape.self / row_length_ * row_length_)),
      place_(static_cast<Rank>(settings.shape.self - row_begin_)),
      row_(row_of(settings), peers_in_row(settings, peers)) {
    terms_ = settings.terms;
    if (settings.rows == 1) return;
    column_.emplace(column_of(settings), peers_in_column(settings, peers));
    column_->expect(column_terms(terms_.bounds.scatter));
}

std::vector<std::uint64_t> Grid::tags(std::uint64_t group_tag, Rank rank, Rank ranks, Rank rows) {
    Settings settings;
    settings.group_tag = group_tag;
    settings.shape = {rank, ranks, 0};
    settings.rows = rows;
    if (rows == 1) return {group_tag};
    return {row_of(settings).group_tag, column_of(settings).group_tag};
}

void Grid::submit(Time now, Ticket ticket, std::span<float> bucket, const Terms& terms) {
    terms_ = terms;
    row_.submit(now, ticket, bucket, terms);
    pump(now);
}

void Grid::say_goodbye() {
    closing_ = true;
    row_.say_goodbye();
    close_column();
}

// It enters all ops of the row before it says goodbye.
void Grid::close_column() {
    if (!column_ || !closing_ || column_closing_ || column_->next_seq() < row_.next_seq()) return;
    column_closing_ = true;
    column_->say_goodbye();
}

void Grid::abort(Time now) {
    row_.abort(now);
    pump(now);
    if (column_) column_->abort(now);
    pump(now);
}

void Grid::leave() {
    row_.leave();
    if (column_) column_->leave();
}

void Grid::receive(Time now, std::span<const std::byte> datagram) {
    const bool column = column_ && wire::tag_of(datagram) == column_->group_tag();
    (column ? *column_ : row_).receive(now, datagram);
    pump(now);
}

std::optional<Rank> Grid::claimed_source(std::span<const std::byte> datagram) const {
    if (datagram.size() < wire::kHeaderBytes) return {};
    const std::uint64_t tag = wire::tag_of(datagram);
    const Rank source = wire::source_of(datagram);
    if (tag == row_.group_tag() && source < row_length_) return static_cast<Rank>(row_begin_ + source);
    if (column_ && tag == column_->group_tag() && source < column_->ranks())
        return static_cast<Rank>(source * row_length_ + place_);
    return {};
}

// The column first: a row waits for each of its owners.
bool Grid::transmit(Time now, Outgoing& out) {
    if (column_ && column_->transmit(now, out)) {
        out.peer = static_cast<Rank>(out.peer * row_length_ + place_);
        return true;
    }
    if (!row_.transmit(now, out)) return false;
    out.peer = static_cast<Rank>(out.peer + row_begin_);
    return true;
}

void Grid::retract(Time now, Outgoing out) {
    const bool column = column_ && out.header.group_tag == column_->group_tag();
    out.peer = static_cast<Rank>(column ? out.peer / row_length_ : out.peer - row_begin_);
    (column ? *column_ : row_).retract(now, out);
}

Time Grid::next_timer() const {
    return column_ ? std::min(row_.next_timer(), column_->next_timer()) : row_.next_timer();
}

void Grid::advance(Time now) {
    row_.advance(now);
    if (column_) column_->advance(now);
    pump(now);
}

// Carry what either has ready to the other, until neither has anything.
void Grid::pump(Time now) {
    if (!column_) return;
    do {
        catch_up(now);
        take_sums(now);
        take_means(now);
    } while (!row_.sums().empty() || !column_->reports().empty());
    if (row_.reports().empty()) return;
    OpReport& latest = row_.reports().back();
    std::move(column_reports_.begin(), column_reports_.end(), std::back_inserter(latest.column));
    column_reports_.clear();
}

// A row that is late would stay so: the means that it waits for are there, but its own SCATTER takes as long as that of
// the others. What it sums is of no use to them any more.
void Grid::catch_up(Time now) {
    if (column_->overtaken(column_->next_seq())) row_.close_scatter(now, column_->next_seq());
}

void Grid::take_sums(Time now) {
    // Of several lengths of one op, the column takes the first.
    const auto void_mean = [&](const Sums& sums) {
        row_.conclude(now, sums.seq, sums.bucket_len, {}, none_of(sums), {}, false);
    };
    for (Sums& sums : std::exchange(row_.sums(), {}))
        if (!waiting_.try_emplace(sums.seq, std::move(sums)).second) void_mean(sums);
    while (!waiting_.empty()) {
        const Seq seq = waiting_.begin()->first;
        if (seq > column_->next_seq()) {
            if (row_.will_sum(column_->next_seq())) break;
            column_->skip_to(seq);  // the row has jumped
        }
        Sums sums = std::move(waiting_.extract(waiting_.begin()).mapped());
        if (seq < column_->next_seq()) {  // or it is far ahead
            void_mean(sums);
            continue;
        }
        column_->resynced();  // who contributes is the row's business
        Sums& kept = summed_.insert_or_assign(Ticket{seq}, std::move(sums)).first->second;
        column_->submit(now, seq, kept.values(), column_terms(kept.due - now), kept.weights);
        column_->expect(column_terms(terms_.bounds.scatter));
    }
    close_column();
}

// With time for other rows, which may have to wait that much longer for their contributions than this one did.
Terms Grid::column_terms(Duration longer) const {
    Bounds bounds = terms_.column_bounds;
    for (Duration* bound : {&bounds.scatter, &bounds.scatter_cap, &bounds.deadline})
        *bound += std::max<Duration>(0, longer);
    Terms terms = terms_;
    terms.bounds = bounds;
    terms.incast = terms_.column_incast;
    terms.skip_above = 0;  // a row's sum stands for many contributions
    return terms;
}

void Grid::take_means(Time now) {
    for (OpReport& report : column_->reports()) {
        const auto sums = summed_.find(report.ticket);
        GranuleSet held = none_of(sums->second);
        std::vector<std::uint8_t> planes(sums->second.weights.size());
        const Layout layout{report.bucket_len, column_->ranks()};
        for (Rank shard = 0; shard < report.held.size() && layout.length(shard) > 0; ++shard) {
            const auto begin = static_cast<std::uint32_t>(layout.begin(shard) / kGranule);
            for (std::uint32_t g = 0, end, all = layout.granules(shard); g < all; g = end) {
                end = report.held[shard].run_end(g, all);
                if (!report.held[shard].test(g)) continue;
                held.set(begin + g, begin + end);
                std::fill(planes.begin() + begin + g, planes.begin() + begin + end,
                          report.mean_planes[shard]);
            }
        }
        row_.conclude(now, static_cast<Seq>(report.ticket), sums->second.bucket_len, sums->second.values(),
                      held, planes, report.non_finite);
        summed_.erase(sums);
        column_reports_.push_back(std::move(report));
    }
    column_->reports().clear();
}

Counters Grid::counters() const {
    Counters counters = row_.counters();
    if (column_) counters += column_->counters();
    return counters;
}

std::size_t Grid::pool_used_bytes() const {
    return row_.memory().pool_used_bytes() + (column_ ? column_->memory().pool_used_bytes() : 0);
}

std::size_t Grid::memory_bytes() const {
    return row_.memory().total_bytes() + (column_ ? column_->memory().total_bytes() : 0);
}

Duration Grid::rtt(Rank rank) const {
    if (rank / row_length_ == row_begin_ / row_length_)
        return row_.peer(static_cast<Rank>(rank - row_begin_)).path.rtt();
    if (column_ && rank % row_length_ == place_)
        return column_->peer(static_cast<Rank>(rank / row_length_)).path.rtt();
    return 0;
}

}  // namespace tailcut
