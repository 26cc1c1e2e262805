#include "penstock/core.h"
#include "penstock/checkpoint.h"

#include <ATen/ops/empty.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include "penstock/metrics.h"
#include "penstock/report.h"
#include "python/src/kept.h"
#include "python/src/module.h"
#include "src/engine/model/blueprint.h"
#include "src/engine/model/values.h"
#include "src/engine/step/token_caches.h"

namespace py = pybind11;

namespace penstock::python {

namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

void bind_tree(py::module_& module) {
  py::class_<ModuleInfo>(module, "ModuleInfo")
      .def(py::init([](std::string name, std::string type, int parent, std::vector<int> params,
                       int rows, bool keeps) {
             return ModuleInfo{
                 std::move(name), std::move(type), parent, std::move(params), rows, keeps};
           }),
           py::arg("name"), py::arg("type"), py::arg("parent"), py::arg("params"),
           py::arg("rows") = -1, py::arg("keeps") = false);
  py::class_<ParamInfo>(module, "ParamInfo")
      .def(py::init([](std::string name, at::Tensor param, int group) {
             return ParamInfo{std::move(name), std::move(param), group};
           }),
           py::arg("name"), py::arg("param"), py::arg("group"))
      // Makes a trainable fp32 parameter without values, for callers that have not imported torch.
      .def(py::init([](std::string name, const std::vector<int64_t>& shape, int group) {
             at::Tensor param = at::empty(shape, at::TensorOptions().device(at::kMeta));
             return ParamInfo{std::move(name), param.set_requires_grad(true), group};
           }),
           py::arg("name"), py::arg("shape"), py::arg("group"));
  py::class_<BufferInfo>(module, "BufferInfo")
      .def(py::init([](std::string name, at::Tensor buffer, int follows) {
             return BufferInfo{std::move(name), std::move(buffer), follows};
           }),
           py::arg("name"), py::arg("buffer"), py::arg("follows") = -1);
  py::class_<ModelTree>(module, "ModelTree")
      .def(py::init([](std::vector<ModuleInfo> modules, std::vector<ParamInfo> params,
                       std::vector<BufferInfo> buffers, std::shared_ptr<ShardedInit> init,
                       std::optional<at::Device> device) {
             return ModelTree{std::move(modules), std::move(params), std::move(buffers),
                              std::move(init), device};
           }),
           py::arg("modules"), py::arg("params"), py::arg("buffers"), py::arg("init"),
           py::arg("device") = py::none())
      .def_property_readonly("device",
                             [](const ModelTree& tree) { return engine::device_of(tree); });
}

// `external`: None for Penstock's kernels, else a function that runs the user's own optimizer. The
// function is called with the interpreter's lock held. `options`: see Core::step().
bool step(Core& core, const std::vector<OptimizerConfig>& groups, const py::object& external,
          const std::string& options) {
  const bool native = external.is_none();
  const py::gil_scoped_release release;
  if (native) return core.step(groups);
  const auto call = [&external] {
    const py::gil_scoped_acquire acquire;
    external();
  };
  return core.step(groups, call, options);
}

void bind_token_caches(py::module_& module) {
  using activations::LayerCache;
  py::class_<LayerCache, std::shared_ptr<LayerCache>>(module, "LayerCache")
      .def_property_readonly("tokens", &LayerCache::tokens)
      .def_property_readonly("batch", &LayerCache::batch)
      .def("select", &LayerCache::select, NoGil())
      .def("remove_last", &LayerCache::remove_last, NoGil())
      .def("keep_past", &LayerCache::keep_past)
      .def("copy", &LayerCache::copy, NoGil())
      .def("clear", &LayerCache::clear);
  py::class_<TokenCaches>(module, "TokenCaches")
      .def_property_readonly("moves", &TokenCaches::moves)
      .def("make", &TokenCaches::make)
      .def(
          "add",
          [](TokenCaches& self, const std::shared_ptr<LayerCache>& cache, at::Tensor keys,
             at::Tensor values) {
            LayerCache::Pair all = self.add(cache, {std::move(keys), std::move(values)});
            return std::pair(std::move(all.keys), std::move(all.values));
          },
          NoGil());
}

void bind_recomputation(py::module_& module) {
  py::class_<Recomputation>(module, "Recomputation")
      .def("begin", &Recomputation::begin, NoGil())
      .def_property_readonly("moves_inputs", &Recomputation::moves_inputs)
      .def("save",
           [](Recomputation& self, int unit, const at::Tensor& input) {
             return py::cpp_function(self.save(unit, input), NoGil());
           })
      .def_property_readonly("saved_bytes", &Recomputation::saved_bytes);
}

}  // namespace

void bind_core(py::module_& module) {
  bind_tree(module);
  bind_recomputation(module);
  bind_token_caches(module);
  py::class_<Calls>(module, "Calls")
      .def("enter", &Calls::enter, NoGil())
      .def("leave", &Calls::leave, NoGil())
      .def("end_backward", &Calls::end_backward, NoGil())
      .def("failed", &Calls::failed, NoGil())
      .def("name_threads", &Calls::name_threads);
  py::class_<UnitInfo>(module, "UnitInfo")
      .def_readonly("module", &UnitInfo::module)
      .def_readonly("is_tile", &UnitInfo::is_tile)
      .def_readonly("recomputed", &UnitInfo::recomputed)
      .def_readonly("away", &UnitInfo::away);
  py::class_<Core, Kept<Core>>(module, "Core")
      .def(py::init<const ModelTree&, const Config&, std::shared_ptr<Group>, bool,
                    std::shared_ptr<Group>>(),
           py::arg("tree"), py::arg("config"), py::arg("group"), py::arg("external_optimizer"),
           py::arg("nodes"), NoGil())
      // Returns a copy, because a reference would keep the core alive.
      .def_property_readonly("config", [](const Core& core) { return Config(core.config()); })
      .def_property_readonly("units", &Core::units)
      .def_property_readonly("needs_unit_events", &Core::needs_unit_events)
      .def("set_groups", &Core::set_groups)
      .def("unit_begin", &Core::unit_begin, NoGil())
      .def("unit_end", &Core::unit_end, NoGil())
      .def("any_forward", &Core::any_forward, NoGil())
      .def("mean", &Core::mean, py::arg("mine"), py::arg("counts") = true, NoGil())
      .def("relearn", &Core::relearn, NoGil())
      .def("resume_backward", &Core::resume_backward, NoGil())
      .def("forward_failed", &Core::forward_failed, NoGil())
      .def(
          "start_backward",
          [](Core& core, const at::Tensor& loss, const std::optional<at::Tensor>& gradient) {
            const at::Tensor start = core.start_backward(loss, gradient.value_or(at::Tensor()));
            return start.defined() ? std::optional(start) : std::nullopt;
          },
          NoGil())
      .def("backward_failed", &Core::backward_failed, NoGil())
      .def("window_complete", &Core::window_complete, NoGil())
      .def("step", &step, py::arg("groups"), py::arg("external") = py::none(),
           py::arg("options") = "")
      .def("zero_grad", &Core::zero_grad, NoGil(), py::arg("set_to_none") = true)
      .def_property_readonly("steps", &Core::steps)
      .def("plan_text", &Core::plan_text)
      .def("set_plan_text", &Core::set_plan_text)
      .def_property_readonly("calls", [](const Core& core) { return Calls(core); })
      .def_property_readonly("recomputation", [](Core& core) { return Recomputation(core); })
      .def_property_readonly("token_caches", [](const Core& core) { return TokenCaches(core); })
      .def_property_readonly("report", [](const Core& core) { return Report(core); })
      .def_property_readonly("metrics", [](const Core& core) { return Metrics(core); })
      .def_property_readonly("values", [](Core& core) { return Values(core); })
      .def_property_readonly("checkpoints", [](Core& core) { return Checkpoints(core); })
      .def("close", &Core::close, py::arg("gather"), py::arg("why"), NoGil());
}

}  // namespace penstock::python
