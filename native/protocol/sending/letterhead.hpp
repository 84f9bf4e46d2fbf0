// The header fields that are the same in every datagram of an endpoint.
#pragma once

#include "protocol/ops/ops.hpp"
#include "protocol/settings.hpp"
#include "wire/header.hpp"

namespace tailcut {

class Letterhead {
public:
    Letterhead(const Settings& settings, const Ops& ops) : settings_(settings), ops_(ops) {}

    // DATA has the epoch of its op, and everything else the latest that the source knows.
    void complete(wire::Header& header) const {
        if (header.type != wire::Type::kData) header.epoch = ops_.latest_epoch();
        header.group_tag = settings_.group_tag;
        header.source = settings_.shape.self;
        header.incast = ops_.terms().incast;
    }

private:
    const Settings& settings_;
    const Ops& ops_;
};

}  // namespace tailcut
