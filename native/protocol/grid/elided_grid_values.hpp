// Values that are not there, in rows and columns: the same packets, runs and accounts (protocol/elided_values.hpp).
#pragma once

#include <memory>

#include "protocol/grid/column_ops.hpp"
#include "protocol/values/values.hpp"

namespace tailcut {

std::unique_ptr<Values> make_elided_row_values(wire::Codec codec);
std::unique_ptr<Values> make_elided_column_values(ColumnOps& ops, wire::Codec codec);

}  // namespace tailcut
