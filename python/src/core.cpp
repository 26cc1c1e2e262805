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
      .def(py::init([](std::string name, std::string type, int parent, std::vector<int> params,
                       int rows) {
             return ModuleInfo{std::move(name), std::move(type), parent, std::move(params), rows};
           }),
           py::arg("name"), py::arg("type"), py::arg("parent"), py::arg("params"),
           py::arg("rows") = -1);
  py::class_<ParamInfo>(module, "ParamInfo")
      .def(py::init([](std::string name, at::Tensor param, int group) {
             return ParamInfo{std::move(name), std::move(param), group};
           }),
           py::arg("name"), py::arg("param"), py::arg("group"));
  py::class_<ModelTree>(module, "ModelTree")
      .def(py::init([](std::vector<ModuleInfo> modules, std::vector<ParamInfo> params,
                       std::vector<at::Tensor> buffers, std::shared_ptr<ShardedInit> init) {
             return ModelTree{std::move(modules), std::move(params), std::move(buffers),
                              std::move(init)};
           }),
           py::arg("modules"), py::arg("params"), py::arg("buffers"), py::arg("init"));
}

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
  dict["act"] = entry.act;
  dict["exchanges"] = entry.exchanges;
  return dict;
}

py::dict ledger_of(const Core& core) {
  const LedgerReport report = core.ledger();
  py::dict predicted;
  for (const auto& [name, entry] : report.predicted) predicted[name.c_str()] = dict_of(entry);
  py::dict dict;
  dict["predicted"] = predicted;
  py::dict measured = dict_of(report.measured);
  measured["disk_read"] = report.disk_read;
  measured["disk_written"] = report.disk_written;
  dict["measured"] = measured;
  dict["strategy"] = report.strategy;
  return dict;
}

bool step(Core& core, const std::vector<OptimizerConfig>& groups, const py::object& external) {
  const bool native = external.is_none();
  const py::gil_scoped_release release;
  if (native) return core.step(groups);
  return core.step(groups, [&external] {
    const py::gil_scoped_acquire acquire;
    external();
  });
}

void bind_recomputation(py::class_<Core>& core) {
  core.def_property_readonly("recomputed_units", &Core::recomputed_units)
      .def_property_readonly("moves_activations", &Core::moves_activations)
      .def_property_readonly("saved_bytes", &Core::saved_bytes)
      .def("unit_again", &Core::unit_again, NoGil())
      .def("save_input", [](Core& core, int unit, const at::Tensor& input) {
        return py::cpp_function(core.save_input(unit, input), NoGil());
      });
}

}  // namespace

void bind_core(py::module_& module) {
  bind_tree(module);
  py::class_<Core> core(module, "Core");
  bind_recomputation(core);
  core.def(py::init<const ModelTree&, const Config&, std::shared_ptr<Group>, bool>(),
           py::arg("tree"), py::arg("config"), py::arg("group"), py::arg("external_optimizer"),
           NoGil())
      .def_property_readonly("unit_modules", &Core::unit_modules)
      .def_property_readonly("needs_unit_events", &Core::needs_unit_events)
      .def("is_tile", &Core::is_tile)
      .def_property_readonly("grad_norm", &Core::grad_norm)
      .def_property_readonly("steps", &Core::steps)
      .def("unit_begin", &Core::unit_begin, NoGil())
      .def("unit_end", &Core::unit_end, NoGil())
      .def("forward_failed", &Core::forward_failed, NoGil())
      .def("start_backward",
           [](Core& core, const at::Tensor& loss, const std::optional<at::Tensor>& gradient) {
             const at::Tensor start = core.start_backward(loss, gradient.value_or(at::Tensor()));
             return start.defined() ? std::optional(start) : std::nullopt;
           })
      .def("backward_failed", &Core::backward_failed)
      .def_property_readonly("loss_scale", &Core::loss_scale)
      .def_property_readonly("skipped_steps", &Core::skipped_steps)
      .def_property_readonly("overflow", &Core::overflow)
      .def("set_groups", &Core::set_groups)
      .def("set_gradients", &Core::set_gradients, NoGil())
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
      .def("close", &Core::close, py::arg("gather"), NoGil());
}

}  // namespace penstock::python
