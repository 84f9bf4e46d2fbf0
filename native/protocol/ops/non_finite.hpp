// Rule 10: an Inf or a NaN in some rank's bucket is never averaged away. From the moment an op has met one,
// every header of the op says so, and every result gets a NaN.
#pragma once

#include <limits>
#include <span>
#include <utility>

#include "wire/header.hpp"

namespace tailcut {

class NonFinite {
public:
    bool met() const { return met_; }
    void note(bool found) { met_ |= found; }
    void hear(const wire::Header& header) { met_ |= (header.flags & wire::kNonFinite) != 0; }
    // `verdict`: a contribution that this rank has accepted as owner holds one.
    void mark(wire::Header& header, bool verdict) const {
        if (met_ || verdict) header.flags |= wire::kNonFinite;
        if (verdict && header.stage() == wire::Stage::kGather) header.flags |= wire::kVerdict;
    }
    // Before the last packet of the own mean leaves, the whole bucket must have been searched, once.
    template <typename Search>
    void search_once(Search search) {
        if (!std::exchange(searched_, true) && !met_) met_ = search();
    }
    // A caller that checks its gradients finds one, whichever packets were lost.
    static void put_into(std::span<float> bucket) {
        if (!bucket.empty()) bucket[0] = std::numeric_limits<float>::quiet_NaN();
    }

private:
    bool met_ = false, searched_ = false;
};

}  // namespace tailcut
