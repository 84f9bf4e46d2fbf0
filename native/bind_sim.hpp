#pragma once

#include <nanobind/nanobind.h>

void bind_sim(nanobind::module_& m);
