// The room at late peers. A peer that has not reached an op keeps the op's means in its pool. Every sender computes
// the room there in the same way, from the sizes of the ops in between, so that means take at most half of the pool.
// The other half is left to its duty as an owner. A shard shrinks to its mean when it is reduced, so only ops count
// there that are not over.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "protocol/roster.hpp"
#include "protocol/sending/links.hpp"
#include "protocol/settings.hpp"
#include "protocol/values/values.hpp"

namespace tailcut {

class PeerPools {
public:
    PeerPools(const Settings& settings, const Epochs& epochs, const Roster& roster, const Links& links)
        : settings_(settings),
          epochs_(epochs),
          roster_(roster),
          links_(links),
          lengths_(2 * std::size_t{settings.window_ops}),
          known_(settings.shape.ranks) {}

    void note_op(Seq seq, std::uint32_t bucket_len) { lengths_[seq % lengths_.size()] = bucket_len; }

    // Whether the engine of a rank that is behind can still serve its shard: it keeps the means of the ops that are
    // over, for which a quarter of the pool is reckoned. `open`: the first op that is not over for this rank.
    bool can_serve(Rank rank, Seq seq, Seq open) const {
        const Seq entered = roster_[rank].entered;
        if (seq > entered && seq - entered > settings_.window_ops) return false;
        std::uint64_t kept = 0;
        for (Seq at = entered; at < open; ++at)
            kept += (std::uint64_t{length_of(at)} / settings_.shape.ranks + kGranule) * sizeof(float);
        return 4 * kept <= links_[rank].settings.pool_bytes;
    }

    bool have_room_for_contributions(Rank rank, Seq seq, Seq open) const {
        const Seq entered = roster_[rank].entered;
        if (seq < entered) return true;
        // First, because it also bounds the sum: after a jump of the local rank a peer may be billions of ops behind.
        if (seq - entered >= settings_.window_ops) return false;
        std::uint64_t needed = 0;
        for (Seq at = std::max(entered, std::min(open, seq)); at <= seq; ++at)
            needed += (owned_floats(settings_.codec,
                                    {length_of(at), settings_.shape.ranks, epochs_.at(at).owners()}) +
                       16) *
                      sizeof(float);
        return 2 * needed <= links_[rank].settings.pool_bytes;
    }

    bool have_room_for_means(Rank rank, Seq seq) {
        const Seq entered = roster_[rank].entered;
        if (seq < entered) return true;
        if (seq - entered >= settings_.window_ops) return false;
        Known& known = known_[rank];
        if (known.entered != entered) known = {entered, entered, std::numeric_limits<Seq>::max()};
        if (seq < known.fits_below) return true;
        if (seq >= known.full_from) return false;
        std::uint64_t needed = 0;
        for (Seq at = entered; at <= seq; ++at) needed += (std::uint64_t{length_of(at)} + 16) * sizeof(float);
        const bool fits = 2 * needed <= links_[rank].settings.pool_bytes;
        (fits ? known.fits_below : known.full_from) = fits ? seq + 1 : seq;
        return fits;
    }

private:
    std::uint32_t length_of(Seq seq) const { return lengths_[seq % lengths_.size()]; }

    // The result while the peer stands still, so that the sum over the ops in between is not recomputed for
    // every packet.
    struct Known {
        Seq entered = std::numeric_limits<Seq>::max(), fits_below = 0, full_from = 0;
    };

    const Settings& settings_;
    const Epochs& epochs_;
    const Roster& roster_;
    const Links& links_;
    std::vector<std::uint32_t> lengths_;  // bucket lengths of recent ops, by seq modulo the size
    std::vector<Known> known_;            // by rank
};

}  // namespace tailcut
