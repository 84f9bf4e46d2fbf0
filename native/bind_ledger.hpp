#pragma once

#include <nanobind/nanobind.h>

void bind_ledger(nanobind::module_& m);
