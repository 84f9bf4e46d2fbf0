// The room at late peers. A peer that has not reached an op keeps the op's packets in its pool. Every sender
// computes the room there in the same way, from the sizes of the ops in between, so the pool is not overrun.
#pragma once

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
    PeerPools(const Settings& settings, const Roster& roster, const Links& links)
        : settings_(settings),
          roster_(roster),
          links_(links),
          lengths_(2 * std::size_t{settings.window_ops}),
          known_(settings.shape.ranks) {}

    void note_op(Seq seq, std::uint32_t bucket_len) { lengths_[seq % lengths_.size()] = bucket_len; }

    bool have_room_for(Rank rank, Seq seq) {
        const Seq entered = roster_[rank].entered;
        if (seq < entered) return true;
        if (seq - entered >= settings_.window_ops) return false;
        Known& known = known_[rank];
        if (known.entered != entered) known = {entered, entered, std::numeric_limits<Seq>::max()};
        if (seq < known.fits_below) return true;
        if (seq >= known.full_from) return false;
        std::uint64_t needed = 0;
        for (Seq at = entered; at <= seq; ++at) {
            const Layout layout{lengths_[at % lengths_.size()], settings_.shape.ranks};
            needed += (owned_floats(settings_.codec, layout) + layout.bucket_len + 32) * sizeof(float);
        }
        const bool fits = needed <= links_[rank].settings.pool_bytes;
        (fits ? known.fits_below : known.full_from) = fits ? seq + 1 : seq;
        return fits;
    }

private:
    // The result while the peer stands still, so that the sum over the ops in between is not recomputed for
    // every packet.
    struct Known {
        Seq entered = std::numeric_limits<Seq>::max(), fits_below = 0, full_from = 0;
    };

    const Settings& settings_;
    const Roster& roster_;
    const Links& links_;
    std::vector<std::uint32_t> lengths_;  // bucket lengths of recent ops, by seq modulo the size
    std::vector<Known> known_;            // by rank
};

}  // namespace tailcut
