#pragma once

#include <nanobind/nanobind.h>

void bind_codec(nanobind::module_& m);
