// The duty of a shard's owner in one op: keep what each rank contributed, decide when SCATTER closes, reduce in
// rank order, and know which runs of the mean each peer has been sent. It never waits for its own gradient.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "protocol/granules.hpp"
#include "protocol/memory.hpp"
#include "protocol/types.hpp"
#include "wire/header.hpp"

namespace tailcut {

struct Bounds {
    Duration scatter = 0;      // t_B: SCATTER closes this long after the entry of the ceil(N/2)-th rank,
    Duration scatter_cap = 0;  // and at the latest this long after the first
    Duration deadline = 0;     // the whole op, from the rank's own entry
};

// Granules [first, last) of a shard whose mean is final; `empty`: nobody delivered them.
struct Run {
    std::uint32_t first, last;
    bool empty;
};

// How far a peer has been sent the runs. Rests on the end of the last run, which may still grow.
struct RunCursor {
    std::uint32_t run = 0, granule = 0;
};

class OwnedShard {
public:
    // `memory` holds one stride per rank: the peers' contributions, then the mean. Without memory the shard can
    // only be closed EMPTY.
    OwnedShard(const Shape& shape, const Layout& layout, Rank shard, Block memory);

    static std::size_t floats(const Layout& layout) { return layout.shard_stride() * layout.ranks; }

    // The caller's shard: holds the own contribution, if there is one, and receives the mean in its place.
    // The memory is no longer the pool's.
    void enter(Time now, float* bucket_shard, bool contributing);
    // The caller takes its shard back. What a peer has not been sent yet is saved.
    void leave();
    // The rank will deliver nothing (more). Its missing granules are waited for no longer.
    void abstain(Rank rank, Time now);
    // As abstain(), and the rank will not apply the mean: it is sent nothing more, which would only delay ops that
    // are alive. A mean that nobody else applies is void: the owner's replica must not part from the others by its
    // own gradient, so what is not final yet becomes EMPTY.
    void end(Rank rank, Time now);
    std::optional<wire::Reject> contribute(Rank from, std::uint32_t first, std::uint32_t last,
                                           std::span<const std::byte> payload, Time now);
    void note_entry(Rank rank, Time entered_at);

    Time close_at(const Bounds& bounds) const;
    void close(Time now);  // reduce what has arrived

    bool closed() const { return final_granules_ == granules_; }
    Time closed_at() const { return closed_at_; }
    std::uint32_t final_granules() const { return final_granules_; }
    bool non_finite() const { return non_finite_; }
    bool abstained(Rank rank) const { return abstains_[rank]; }
    const GranuleSet& arrived(Rank rank) const { return arrived_[rank]; }
    std::span<const Run> runs() const { return runs_; }
    const float* mean() const { return bucket_shard_ ? bucket_shard_ : mean_; }

    // Sending. `pending` is the next run to send to the peer, cut to what is left of it.
    std::optional<Run> pending(Rank peer) const;
    RunCursor cursor(Rank peer) const { return cursors_[peer]; }
    void advance(Rank peer, std::uint32_t granules);
    void rewind(Rank peer, RunCursor to);
    bool served(Rank peer) const { return closed() && !pending(peer); }

    // Once closed: keep the mean only, in `smaller`, which holds one stride.
    void compact(Block smaller);
    bool compacted() const { return mean_ == memory_.data(); }
    bool pooled() const { return memory_.pooled(); }

private:
    float* slot(Rank rank) const;
    void finalize(std::uint32_t first, std::uint32_t last, Rank direct_rank = 0,
                  const float* direct = nullptr);
    void finalize_complete(std::uint32_t first, std::uint32_t last, Time now);
    void append(Run run);

    const Shape shape_;
    const Layout layout_;
    const Rank shard_;
    const std::uint32_t granules_;
    Block memory_;
    float* mean_;
    float* bucket_shard_ = nullptr;  // between enter() and leave(): where the mean is

    std::vector<GranuleSet> arrived_;     // by rank: granules with a value
    std::vector<std::uint16_t> settled_;  // by granule: ranks that delivered it or never will
    GranuleSet final_;                    // granules whose mean is computed
    std::vector<bool> ended_;             // by rank
    bool uneven_ = false;                 // a rank abstained half-way: neighbours differ in contributors
    std::vector<bool> abstains_;          // by rank
    std::vector<bool> entry_known_;       // by rank
    std::vector<Time> entries_;           // ascending
    std::uint32_t final_granules_ = 0;
    Time closed_at_ = 0;
    bool non_finite_ = false;

    std::vector<Run> runs_;
    std::vector<RunCursor> cursors_;     // by peer
    std::vector<const float*> sources_;  // scratch of finalize
};

}  // namespace tailcut
