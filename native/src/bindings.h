// The pieces of the Python module.
#pragma once
#include <nanobind/nanobind.h>

#include "context.h"

namespace octavo {
void bind_handles(nanobind::module_& m);
void bind_limits(nanobind::module_& m);
void bind_packing(nanobind::class_<Context>& context);
void bind_program(nanobind::module_& m, nanobind::class_<Context>& context);
void bind_sampling(nanobind::class_<Context>& context);
}  // namespace octavo
