// Adds reports and counters to the module.
#pragma once

#include <nanobind/nanobind.h>

void bind_reports(nanobind::module_& m);
