#include "penstock/plan.h"

#include <pybind11/stl.h>

#include "penstock/core.h"
#include "python/src/module.h"

namespace py = pybind11;

namespace penstock::python {

namespace {

py::dict dict_of(const Alternative& one) {
  py::dict dict;
  dict["strategy"] = one.strategy;
  dict["optimizer"] = one.optimizer;
  dict["params"] = one.params;
  dict["device"] = one.device;
  dict["host"] = one.host;
  dict["disk"] = one.disk;
  dict["seconds"] = one.seconds;
  dict["longest"] = one.longest;
  dict["fits"] = one.fits;
  dict["tight"] = one.tight;
  dict["over"] = one.over;
  return dict;
}

py::dict report_of(const ModelTree& tree, const PlanQuestion& question) {
  const PlanReport report = plan_report(tree, question);
  py::list alternatives;
  for (const Alternative& one : report.alternatives) alternatives.append(dict_of(one));
  py::dict dict;
  dict["alternatives"] = alternatives;
  dict["same"] = report.same;
  dict["text"] = report.text;
  return dict;
}

}  // namespace

void bind_plan(py::module_& module) {
  py::class_<Machine>(module, "Machine")
      .def(py::init<>())
      .def_readwrite("flops", &Machine::flops)
      .def_readwrite("local", &Machine::local)
      .def_readwrite("node", &Machine::node)
      .def_readwrite("device_host", &Machine::device_host)
      .def_readwrite("host_disk", &Machine::host_disk)
      .def_readwrite("host_memory", &Machine::host_memory)
      .def_readwrite("device_memory", &Machine::device_memory);
  module.def("strategy_names", &strategy_names);
  module.def(
      "plan_report",
      [](const ModelTree& tree, const Config& config, int world_size, double tokens,
         const Machine& machine) {
        return report_of(tree, {config, world_size, tokens, machine, {}});
      },
      py::arg("tree"), py::arg("config"), py::arg("world_size"), py::arg("tokens"),
      py::arg("machine"));
}

}  // namespace penstock::python
