#include "python/src/module.h"

#include "penstock/error.h"

namespace penstock::python {

void bind_errors(pybind11::module_& module) {
  pybind11::register_exception<ConfigError>(module, "ConfigError", PyExc_ValueError);
  pybind11::register_exception<RuntimeFault>(module, "RuntimeFault", PyExc_RuntimeError);
  pybind11::register_exception<Bug>(module, "Bug", PyExc_AssertionError);
}

}  // namespace penstock::python

PYBIND11_MODULE(_penstock, module) {
  module.attr("TORCH_MINOR") = PENSTOCK_TORCH_MINOR;
  penstock::python::bind_errors(module);
  penstock::python::bind_config(module);
  penstock::python::bind_checkpoint(module);
  penstock::python::bind_optimizer_kinds(module);
  penstock::python::bind_group(module);
  penstock::python::bind_init(module);
  penstock::python::bind_core(module);
  penstock::python::bind_metrics(module);
  penstock::python::bind_one_host(module);
  penstock::python::bind_plan(module);
  penstock::python::bind_report(module);
  penstock::python::bind_pipeline_ranks(module);
  penstock::python::bind_sequence_ranks(module);
  penstock::python::bind_status(module);
  penstock::python::bind_tensor_ranks(module);
  penstock::python::bind_tiling(module);
  penstock::python::bind_values(module);
}
