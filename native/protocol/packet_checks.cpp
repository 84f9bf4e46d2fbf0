#include "protocol/packet_checks.hpp"

#include "codec/blocks.hpp"
#include "protocol/ops/layout.hpp"
#include "protocol/sending/arrivals.hpp"

namespace tailcut {

std::optional<wire::Reject> check_sender(const Settings& settings, const wire::Header& header,
                                         std::size_t payload_bytes) {
    if (header.group_tag != settings.group_tag) return wire::Reject::kGroup;
    if (header.source >= settings.shape.ranks || header.source == settings.shape.self)
        return wire::Reject::kSource;
    if (header.incarnation != 0) return wire::Reject::kEpoch;
    if (header.type == wire::Type::kData) return std::nullopt;
    if (header.type == wire::Type::kState)  // a run that was trimmed is asked for again
        return payload_bytes == wire::stated_payload_bytes(header) ? std::nullopt
                                                                   : std::optional(wire::Reject::kShape);
    const std::size_t lists = header.flags & wire::kCutsListed ? 2 : 1;
    const bool report_ok = header.report_words <= lists * wire::kReportWords &&
                           header.report_words % lists == 0 &&
                           payload_bytes <= wire::stated_payload_bytes(header);
    return report_ok ? std::nullopt : std::optional(wire::Reject::kShape);
}

std::optional<wire::Reject> check_data(const Settings& settings, const Epoch& epoch,
                                       const wire::Header& header, std::size_t payload_bytes) {
    const Shape& shape = settings.shape;
    const bool gather = header.stage() == wire::Stage::kGather;
    if (!header.empty() && header.codec != settings.codec) return wire::Reject::kType;
    if (header.shard >= shape.ranks) return wire::Reject::kShape;
    const Plan plan(shape, header.seq, bucket_of(header), epoch);
    if (!plan.layout.owned(header.shard)) return wire::Reject::kOwner;
    if (plan.owner(header.shard) != (gather ? header.source : shape.self)) return wire::Reject::kOwner;
    if (!gather && header.entry_us == wire::kNotEntered) return wire::Reject::kShape;
    if (payload_bytes > wire::stated_payload_bytes(header)) return wire::Reject::kShape;
    if ((header.flags & wire::kOver) && (gather || header.count != 0)) return wire::Reject::kShape;
    if (header.count == 0)
        return header.empty() && header.first == 0 ? std::nullopt : std::optional(wire::Reject::kShape);
    if (header.empty() && !gather) return wire::Reject::kShape;

    const std::uint32_t length = plan.layout.length(header.shard);
    return codec::run_fits(header, length) ? std::nullopt : std::optional(wire::Reject::kShape);
}

}  // namespace tailcut
