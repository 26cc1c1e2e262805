#pragma once
// The bindings have one function per public header, which module.cpp calls. The public headers
// document shapes, units, dtypes and errors; these files only convert values.
#include <torch/csrc/utils/pybind.h>

#include "src/tiles/tiling.h"

namespace penstock::python {

void bind_checkpoint(pybind11::module_& module);
void bind_config(pybind11::module_& module);
void bind_group(pybind11::module_& module);
void bind_init(pybind11::module_& module);
void bind_core(pybind11::module_& module);
void bind_metrics(pybind11::module_& module);
void bind_one_host(pybind11::module_& module);
void bind_optimizer_kinds(pybind11::module_& module);
void bind_pipeline_ranks(pybind11::module_& module);
void bind_plan(pybind11::module_& module);
void bind_report(pybind11::module_& module);
void bind_sequence_ranks(pybind11::module_& module);
void bind_status(pybind11::module_& module);
void bind_tensor_ranks(pybind11::module_& module);
void bind_tiling(pybind11::module_& module);
void bind_values(pybind11::module_& module);

// Reads {"ignore_index", "reduction", "label_smoothing"}.
CrossEntropyOptions cross_entropy_options(const pybind11::dict& options);

// Registers the C++ errors as penstock.ConfigError(ValueError), RuntimeFault(RuntimeError) and
// Bug(AssertionError).
void bind_errors(pybind11::module_& module);

}  // namespace penstock::python
