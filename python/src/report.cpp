#include "penstock/report.h"

#include <pybind11/stl.h>

#include "python/src/module.h"

namespace py = pybind11;

namespace penstock::python {

namespace {

// Returns the bytes on this rank by role and by tier (penstock/report.h).
py::dict dict_of(const LedgerEntry& entry) {
  py::dict dict;
  dict["param"] = entry.param;
  dict["grad"] = entry.grad;
  dict["optim"] = entry.optim;
  dict["buffers"] = entry.buffers;
  dict["total"] = entry.total;
  dict["disk"] = entry.disk;
  dict["device"] = entry.device;
  dict["host"] = entry.host;
  dict["memory"] = entry.memory;
  dict["act"] = entry.act;
  dict["cache"] = entry.cache;
  dict["activations"] = entry.activations;
  dict["step_device"] = entry.step_device;
  dict["step_memory"] = entry.step_memory;
  dict["exchanges"] = entry.exchanges;
  return dict;
}

py::dict dict_of(const ResidentMemory& memory) {
  py::dict dict;
  dict["process"] = memory.process;
  dict["engine"] = memory.engine;
  dict["libraries"] = memory.libraries;
  dict["shared"] = memory.shared;
  dict["heap"] = memory.heap;
  dict["heap_free"] = memory.heap_free;
  return dict;
}

py::dict ledger_of(const Report& whole) {
  const LedgerReport report = whole.ledger();
  py::dict predicted;
  for (const auto& [name, entry] : report.predicted) predicted[name.c_str()] = dict_of(entry);
  py::dict dict;
  dict["predicted"] = predicted;
  py::dict measured = dict_of(report.measured);
  measured["disk_read"] = report.disk_read;
  measured["disk_written"] = report.disk_written;
  dict["measured"] = measured;
  dict["resident"] = dict_of(report.resident);
  dict["strategy"] = report.strategy;
  return dict;
}

}  // namespace

void bind_report(py::module_& module) {
  py::class_<Report>(module, "Report")
      .def_property_readonly("grad_norm", &Report::grad_norm)
      .def_property_readonly("loss_scale", &Report::loss_scale)
      .def_property_readonly("skipped_steps", &Report::skipped_steps)
      .def_property_readonly("overflow", &Report::overflow)
      .def("ledger", &ledger_of)
      .def("explain", &Report::explain);
}

}  // namespace penstock::python
