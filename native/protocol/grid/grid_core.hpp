// A group of many ranks as a grid: rows of neighbours, and columns of the ranks with the same place in their rows. An op
// then has four stages, and a rank talks to its row and its column only:
//
//     SCATTER in the row: the owner of a shard sums its row's contributions
//         SCATTER in the column: the owner of a part of that shard averages the sums of all rows, by their weights
//         GATHER in the column
//     GATHER in the row
//
// Rows and columns are groups of their own: two endpoints with other peers and tags. What one cannot deliver is missing as
// it is in a flat group: contributions that are not in a mean, for everybody alike, or a mean that did not come, which is a
// zero. See docs/grid.md.
#pragma once

#include <span>
#include <utility>
#include <vector>

#include "protocol/endpoint.hpp"
#include "protocol/grid/column_values.hpp"
#include "protocol/grid/row_values.hpp"

namespace tailcut {

class GridCore final : public Core, private CloseListener {
public:
    // `peers` by rank. Settings::rows divides the ranks and is more than one; a grid has no multicast.
    GridCore(const Settings& settings, const std::vector<PeerSettings>& peers);

    static Rank senders(Rank ranks, Rank rows) { return static_cast<Rank>(ranks / rows + rows - 1); }

    // Of what comes to a rank: that of its row and that of its column.
    static std::vector<std::uint64_t> tags(std::uint64_t group_tag, Rank rank, Rank ranks, Rank rows);

    // Ranks are those of the whole group, in reports those of the row.
    void submit(Time now, Ticket ticket, std::span<float> bucket, const Terms& terms) override;
    void resynced() override { row_.resynced(); }
    void skipped(Seq, Seq) override {}  // grids do not carry
    void forget(std::uint32_t, std::uint64_t, std::uint64_t) override {}
    // The weights are alike in every row.
    void install(Time now, Epoch epoch) override;
    void set_away(bool away) override { row_.set_away(away); }
    void say_goodbye() override;
    void abort(Time now) override;
    void leave() override;
    bool drained() const override { return row_.drained() && column_.drained(); }

    void receive(Time now, std::span<const std::byte> datagram) override;
    std::optional<Rank> claimed_source(std::span<const std::byte> datagram) const override;
    bool transmit(Time now, Outgoing& out) override;
    void retract(Time now, const Outgoing& out) override;
    Time next_timer() const override { return std::min(row_.next_timer(), column_.next_timer()); }
    void advance(Time now) override;

    std::vector<OpReport>& reports() override { return row_.reports(); }
    std::vector<OpReport> take_served() override {
        column_.take_served();  // sums of rows, which are not on record
        return row_.take_served();
    }
    Counters counters() const override;
    std::size_t pool_used_bytes() const override {
        return row_.pool_used_bytes() + column_.pool_used_bytes();
    }
    std::size_t memory_bytes() const override { return row_.memory_bytes() + column_.memory_bytes(); }
    Duration rtt(Rank rank) const override;
    bool contributing() const override { return row_.contributing(); }
    std::size_t in_flight() const override { return row_.in_flight(); }
    Seq next_seq() const override { return row_.next_seq(); }
    Seq group_seq() const override { return row_.next_seq(); }  // grids keep no history to catch up with
    std::uint16_t heard_epoch() const override { return std::max(row_.heard_epoch(), column_.heard_epoch()); }

private:
    void on_close(Op& op, Time due) override;
    void pump(Time now);
    void catch_up(Time now);
    void take_sums(Time now);
    void enter_column(Time now, Seq seq, ColumnOp op);
    void take_means(Time now);
    void put_mean(Time now, Seq seq, const ColumnOp& op, const RowMean* mean, bool non_finite);
    void skip_unowned();
    void close_column();
    Terms column_terms(Duration longer) const;

    const Rank row_length_;
    const Rank row_begin_,
        place_;  // of this rank: the first rank of its row, and how many come before it there
    const bool elided_;
    Terms terms_;   // of the column's next op
    Endpoint row_;  // its memory is what sums are in
    Endpoint column_;
    ColumnOps column_ops_;                          // in the column; their means are in its memory
    ColumnOps waiting_;                             // to enter the column, which is done in order
    std::vector<std::pair<Seq, ColumnOp>> closed_;  // as the row hands them over
    std::vector<OpReport> column_reports_;
    bool closing_ = false, column_closing_ = false;
};

}  // namespace tailcut
