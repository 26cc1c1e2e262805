#include "penstock/core.h"

#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include "python/src/module.h"

namespace py = pybind11;

namespace penstock::python {

namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

void bind_tree(py::module_& module) {
  py::class_<ModuleInfo>(module, "ModuleInfo")
      .def(py::init([](std::string name, std::string type, int parent, std::vector<int> params) {
             return ModuleInfo{std::move(name), std::move(type), parent, std::move(params)};
           }),
           py::arg("name"), py::arg("type"), py::arg("parent"), py::arg("params"));
  py::class_<ParamInfo>(module, "ParamInfo")
      .def(py::init([](std::string name, at::Tensor param, int group) {
             return ParamInfo{std::move(name), std::move(param), group};
           }),
           py::arg("name"), py::arg("param"), py::arg("group"));
  py::class_<ModelTree>(module, "ModelTree")
      .def(py::init([](std::vector<ModuleInfo> modules, std::vector<ParamInfo> params,
                       std::vector<at::Tensor> buffers) {
             return ModelTree{std::move(modules), std::move(params), std::move(buffers)};
           }),
           py::arg("modules"), py::arg("params"), py::arg("buffers"));
  py::class_<GroupSettings>(module, "GroupSettings")
      .def(py::init<>())
      .def_readwrite("type", &GroupSettings::type)
      .def_readwrite("lr", &GroupSettings::lr)
      .def_readwrite("beta1", &GroupSettings::beta1)
      .def_readwrite("beta2", &GroupSettings::beta2)
      .def_readwrite("eps", &GroupSettings::eps)
      .def_readwrite("weight_decay", &GroupSettings::weight_decay)
      .def_readwrite("momentum", &GroupSettings::momentum)
      .def_readwrite("dampening", &GroupSettings::dampening)
      .def_readwrite("nesterov", &GroupSettings::nesterov);
}

py::dict dict_of(const LedgerEntry& entry) {
  py::dict dict;
  dict["param"] = entry.param;
  dict["grad"] = entry.grad;
  dict["optim"] = entry.optim;
  dict["buffers"] = entry.buffers;
  dict["total"] = entry.total;
  return dict;
}

py::dict ledger_of(const Core& core) {
  const LedgerReport report = core.ledger();
  py::dict predicted;
  for (const auto& [name, entry] : report.predicted) predicted[name.c_str()] = dict_of(entry);
  py::dict dict;
  dict["predicted"] = predicted;
  dict["measured"] = dict_of(report.measured);
  dict["strategy"] = report.strategy;
  return dict;
}

void step(Core& core, const std::vector<GroupSettings>& groups, const py::object& external) {
  const bool native = external.is_none();
  const py::gil_scoped_release release;
  if (native) return core.step(groups);
  core.step(groups, [&external] {
    const py::gil_scoped_acquire acquire;
    external();
  });
}

}  // namespace

void bind_core(py::module_& module) {
  bind_tree(module);
  py::class_<Core>(module, "Core")
      .def(py::init<const ModelTree&, const Config&, std::shared_ptr<Group>, bool>(),
           py::arg("tree"), py::arg("config"), py::arg("group"), py::arg("external_optimizer"),
           NoGil())
      .def_property_readonly("unit_modules", &Core::unit_modules)
      .def_property_readonly("needs_unit_events", &Core::needs_unit_events)
      .def_property_readonly("grad_norm", &Core::grad_norm)
      .def_property_readonly("steps", &Core::steps)
      .def("unit_begin", &Core::unit_begin, NoGil())
      .def("unit_end", &Core::unit_end, NoGil())
      .def("forward_failed", &Core::forward_failed, NoGil())
      .def("check_backward", &Core::check_backward)
      .def("window_complete", &Core::window_complete)
      .def("step", &step, py::arg("groups"), py::arg("external") = py::none())
      .def("shards",
           [](Core& core) {
             std::vector<py::tuple> shards;
             for (auto& [name, param, master] : core.shards()) {
               shards.push_back(py::make_tuple(name, param, master));
             }
             return shards;
           })
      .def("shard_gradients",
           [](Core& core) {
             std::vector<std::optional<at::Tensor>> gradients;
             for (at::Tensor& gradient : core.shard_gradients()) {
               gradients.emplace_back();
               if (gradient.defined()) gradients.back() = gradient;
             }
             return gradients;
           })
      .def("full", &Core::full, NoGil())
      .def("gather", &Core::gather, NoGil())
      .def("release", &Core::release, NoGil())
      .def("units_of", &Core::units_of)
      .def("ledger", &ledger_of)
      .def("explain", &Core::explain)
      .def("plan_text", &Core::plan_text)
      .def("set_plan_text", &Core::set_plan_text)
      .def("close", &Core::close, NoGil());
  module.def(
      "plan_report",
      [](const std::string& json_text, const std::vector<int64_t>& unit_numel, int world_size) {
        return plan_report(Config::parse(json_text), unit_numel, world_size);
      },
      py::arg("config_json"), py::arg("numel_per_unit"), py::arg("world_size"));
}

}  // namespace penstock::python
