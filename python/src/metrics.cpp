#include "penstock/metrics.h"

#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <cmath>

#include "python/src/module.h"

namespace py = pybind11;

namespace penstock::python {

namespace {

// Unknown values become None, and whole numbers become ints. docs/monitoring.md documents names and
// units.
py::dict dict_of(const StepMetrics& metrics) {
  py::dict dict;
  for (const auto& [name, value] : metrics.values()) {
    if (std::isnan(value)) {
      dict[name.c_str()] = py::none();
    } else if (name == "step" || name == "samples" || name == "tokens" || name == "skipped_steps" ||
               name.ends_with("_bytes")) {
      dict[name.c_str()] = static_cast<int64_t>(value);
    } else {
      dict[name.c_str()] = value;
    }
  }
  return dict;
}

}  // namespace

void bind_metrics(py::module_& module) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  py::class_<Metrics>(module, "Metrics")
      .def("count", &Metrics::count, py::arg("samples"), py::arg("tokens"))
      .def("set_flops", &Metrics::set_flops, py::arg("per_sample"), py::arg("rank_peak"))
      .def("set_lr", &Metrics::set_lr, py::arg("lr"))
      .def("set_work", &Metrics::set_work, py::arg("forward_flops"))
      .def_property_readonly("unit", &Metrics::unit)
      .def_property_readonly("last", [](const Metrics& self) { return dict_of(self.last()); })
      .def("flush", &Metrics::flush, NoGil())
      .def("write_last", &Metrics::write_last, py::arg("path"), NoGil())
      // {(row, kind): (count, bytes, seconds)}
      .def("sums",
           [](const Metrics& self) {
             py::dict rows;
             for (const RowSum& one : self.sums()) {
               rows[py::make_tuple(one.row, one.kind)] =
                   py::make_tuple(one.count, one.bytes, one.seconds);
             }
             return rows;
           })
      .def("trace", &Metrics::trace, py::arg("path"), py::arg("steps"),
           py::arg("more") = py::none());
}

}  // namespace penstock::python
