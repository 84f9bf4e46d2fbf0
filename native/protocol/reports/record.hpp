// The record of one op in the ledger, without its frame (docs/ledger.md has the bytes). The fields are those that the
// structs list, so a file says itself which it has.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "protocol/reports/report.hpp"

namespace tailcut {

std::vector<std::byte> record_of(const OpReport& report);

// The structs of a record, their fields and how each is written, as JSON.
std::string record_schema();

}  // namespace tailcut
