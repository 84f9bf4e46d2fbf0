// The header fields that are the same in every datagram of an endpoint.
#pragma once

#include "protocol/ops/ops.hpp"
#include "protocol/settings.hpp"
#include "wire/header.hpp"

namespace tailcut {

class Letterhead {
public:
    Letterhead(const Settings& settings, const Ops& ops) : settings_(settings), ops_(ops) {}

    void complete(wire::Header& header) const {
        header.group_tag = settings_.group_tag;
        header.source = settings_.shape.self;
        header.incast = ops_.terms().incast;
    }

private:
    const Settings& settings_;
    const Ops& ops_;
};

}  // namespace tailcut
