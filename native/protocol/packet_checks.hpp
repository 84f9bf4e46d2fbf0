// Checks whether a packet fits the group that it claims to belong to (rule 11; docs/wire-format.md).
// wire/header.cpp checks what a header can prove about itself.
#pragma once

#include <cstddef>
#include <optional>
#include <span>

#include "protocol/settings.hpp"
#include "wire/header.hpp"

namespace tailcut {

// Checks W4, W5, the incarnation of W13, and W7 of FEEDBACK, GOODBYE and STATE.
std::optional<wire::Reject> check_sender(const Settings& settings, const wire::Header& header,
                                         std::size_t payload_bytes);
// Checks W3, W7 and W8 of DATA, which is of the epoch of its op.
std::optional<wire::Reject> check_data(const Settings& settings, const Epoch& epoch,
                                       const wire::Header& header, std::size_t payload_bytes);

}  // namespace tailcut
