#include "python/src/module.h"

#include <exception>
#include <string_view>

#include "penstock/error.h"

namespace penstock::python {

namespace {

// Paths and damaged files may put bytes that are not UTF-8 into error texts. These bytes become
// \xNN, because pybind's own translator would raise a UnicodeDecodeError instead of the error.
template <class Error>
void bind_error(pybind11::module_& module, const char* name, PyObject* base) {
  static const pybind11::object* const type =
      new pybind11::exception<Error>(module, name, base);  // lives as long as the process
  pybind11::register_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const Error& error) {
      const std::string_view text = error.what();
      const auto said = pybind11::reinterpret_steal<pybind11::object>(PyUnicode_DecodeUTF8(
          text.data(), static_cast<Py_ssize_t>(text.size()), "backslashreplace"));
      PyErr_SetObject(type->ptr(), said.ptr());
    }
  });
}

}  // namespace

void bind_errors(pybind11::module_& module) {
  bind_error<ConfigError>(module, "ConfigError", PyExc_ValueError);
  bind_error<RuntimeFault>(module, "RuntimeFault", PyExc_RuntimeError);
  bind_error<Bug>(module, "Bug", PyExc_AssertionError);
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
