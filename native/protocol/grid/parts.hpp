// The part of a row's shard that a rank of the column owns, as packets. Its values are in the rotated domain of the row: the
// row's blocks have one scale each, and so have their spans, as far as they lie within the part. Spans end with the part's
// own blocks, too, because packets must (W7).
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "codec/send_order.hpp"
#include "protocol/ops/layout.hpp"

namespace tailcut {

// The spans of granules [first, last) of a part. `counts`, by granule of the part: those of a span are alike; or null.
inline std::vector<codec::BlockSpan> spans_of(const Layout& layout, Rank part, std::uint32_t first,
                                              std::uint32_t last, const float* counts = nullptr) {
    const codec::Blocks row_blocks(layout.bucket_len), own_blocks(layout.length(part));
    const auto origin = static_cast<std::uint32_t>(layout.begin(part) / kGranule);
    std::vector<codec::BlockSpan> spans;
    for (std::uint32_t at = first, end; at < last; at = end) {
        end = std::min({last, own_blocks.of(at * kGranule).last_granule(),
                        row_blocks.of((origin + at) * kGranule).last_granule() - origin});
        if (counts)
            end = static_cast<std::uint32_t>(
                std::find_if(counts + at, counts + end, [&](float count) { return count != counts[at]; }) -
                counts);
        spans.push_back({at, at * kGranule, (end - at) * kGranule});
    }
    return spans;
}

// Their packets, in turns, as codec::SendOrder has them.
inline codec::Stripe stripe_of(std::vector<codec::BlockSpan> spans, std::uint32_t packet_granules) {
    codec::Stripe stripe{std::move(spans), {}};
    for (std::uint32_t turn = 0, left = 1; left > 0; ++turn) {
        left = 0;
        for (std::uint32_t b = 0; b < stripe.blocks.size(); ++b) {
            const std::uint32_t last = stripe.blocks[b].last_granule();
            const std::uint32_t first = stripe.blocks[b].first_granule() + turn * packet_granules;
            if (first >= last) continue;
            ++left;
            stripe.packets.push_back({first, std::min(first + packet_granules, last), b});
        }
    }
    return stripe;
}

}  // namespace tailcut
