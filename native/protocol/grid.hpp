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
// zero. With one row there is no column: a flat group. See docs/grid.md.
#pragma once

#include <map>
#include <optional>
#include <span>
#include <vector>

#include "protocol/endpoint.hpp"

namespace tailcut {

class Grid {
public:
    // `peers` by rank. Settings::rows divides the ranks; a grid has no multicast.
    Grid(const Settings& settings, const std::vector<PeerSettings>& peers);

    // Ranks that send to one, and itself: they share what it can take.
    static Rank senders(Rank ranks, Rank rows) {
        return rows == 1 ? ranks : static_cast<Rank>(ranks / rows + rows - 1);
    }

    // The tags of what comes to a rank: that of its row and that of its column, or the group's own if there is one row.
    static std::vector<std::uint64_t> tags(std::uint64_t group_tag, Rank rank, Rank ranks, Rank rows);

    // As Endpoint. Ranks are those of the whole group, in reports those of the row.
    void submit(Time now, Ticket ticket, std::span<float> bucket, const Terms& terms);
    void resynced() { row_.resynced(); }
    void say_goodbye();
    void abort(Time now);
    void leave();
    bool drained() const { return row_.drained() && (!column_ || column_->drained()); }

    void receive(Time now, std::span<const std::byte> datagram);
    // The rank that a datagram says it is from; none if it is not a packet of this rank's row or column.
    std::optional<Rank> claimed_source(std::span<const std::byte> datagram) const;
    bool transmit(Time now, Outgoing& out);
    void retract(Time now, Outgoing out);
    Time next_timer() const;
    void advance(Time now);

    std::vector<OpReport>& reports() { return row_.reports(); }
    Counters counters() const;
    std::size_t pool_used_bytes() const;
    std::size_t memory_bytes() const;
    Duration rtt(Rank rank) const;  // 0: not known
    bool contributing() const { return row_.contributing(); }
    std::size_t in_flight() const { return row_.in_flight(); }

private:
    void pump(Time now);
    void catch_up(Time now);
    void take_sums(Time now);
    void take_means(Time now);
    void close_column();
    Terms column_terms(Duration longer) const;

    const Rank row_length_;
    const Rank row_begin_,
        place_;     // of this rank: the first rank of its row, and how many come before it there
    Terms terms_;   // of the column's next op
    Endpoint row_;  // its memory is what sums are in
    std::optional<Endpoint> column_;
    std::map<Seq, Sums> waiting_;    // to enter the column, which is done in order
    std::map<Ticket, Sums> summed_;  // in the column, by seq
    std::vector<OpReport> column_reports_;
    bool closing_ = false, column_closing_ = false;
};

}  // namespace tailcut
