// Whether a packet fits the group it claims to be of (rule 11; docs/wire-format.md). What a header can prove about itself is
// checked in wire/header.cpp.
#pragma once

#include <cstddef>
#include <optional>
#include <span>

#include "protocol/settings.hpp"
#include "wire/header.hpp"

namespace tailcut {

// W4, W5, W13, and of FEEDBACK and GOODBYE W7.
std::optional<wire::Reject> check_sender(const Settings& settings, const wire::Header& header,
                                         std::size_t payload_bytes);
// Of DATA: W3, W7 and W8.
std::optional<wire::Reject> check_data(const Settings& settings, const wire::Header& header,
                                       std::size_t payload_bytes);

}  // namespace tailcut
