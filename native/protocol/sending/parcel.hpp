// What a DATA packet carried, so that its op can make it again, and the parcels that were lost on the way to
// a peer.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <tuple>

#include "base/types.hpp"
#include "protocol/ops/ownership.hpp"
#include "wire/header.hpp"

namespace tailcut {

struct Parcel {
    Seq seq = 0;
    BucketId bucket{};
    wire::Stage stage = wire::Stage::kScatter;
    bool empty = false;
    std::uint32_t first = 0;     // SCATTER: the contribution's step; GATHER: the shard's granule
    std::uint32_t granules = 0;  // GATHER only
    bool last_part = false;
    bool cut = false;  // it came trimmed, and is sent again behind everything alive
};

// Kept in the order of the shard, so that values that are encoded together are encoded again only once.
class LostParcels {
public:
    void add(const Parcel& parcel) { parcels_.insert(parcel); }
    template <typename Unwanted>
    void drop_if(Unwanted unwanted) {
        std::erase_if(parcels_, unwanted);
    }
    bool empty() const { return parcels_.empty(); }
    Seq oldest() const { return parcels_.begin()->seq; }  // must not be empty
    bool any(Seq seq) const {
        return any(seq, [](const Parcel&) { return true; });
    }
    template <typename Wanted>
    bool any(Seq seq, Wanted wanted) const {
        auto at = parcels_.lower_bound(Parcel{.seq = seq});
        while (at != parcels_.end() && at->seq == seq && !wanted(*at)) ++at;
        return at != parcels_.end() && at->seq == seq;
    }
    // The first one that is wanted.
    template <typename Wanted>
    std::optional<Parcel> take(Seq seq, BucketId bucket, wire::Stage stage, Wanted wanted) {
        auto at = parcels_.lower_bound(Parcel{.seq = seq, .bucket = bucket, .stage = stage});
        for (; at != parcels_.end() && at->seq == seq && at->bucket == bucket && at->stage == stage; ++at)
            if (wanted(*at)) return parcels_.extract(at).value();
        return std::nullopt;
    }

private:
    struct Before {
        static auto place(const Parcel& parcel) {
            return std::tuple(parcel.seq, parcel.bucket, parcel.stage, parcel.first);
        }
        bool operator()(const Parcel& a, const Parcel& b) const { return place(a) < place(b); }
    };
    std::multiset<Parcel, Before> parcels_;
};

}  // namespace tailcut
