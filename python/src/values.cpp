#include "src/engine/model/values.h"
#include "src/engine/model/held_units.h"

#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include "python/src/module.h"

namespace py = pybind11;

namespace penstock::python {

namespace {

void bind_inference(py::class_<Values>& values) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  values.def("hold", &hold, NoGil())
      .def("let_go_of_held", &let_go_of_held, NoGil())
      .def("abandon_held", &abandon_held, NoGil())
      .def("begin_pass", &begin_pass)
      .def("end_pass", &end_pass)
      .def("first_units", &first_units);
}

}  // namespace

// Methods that exchange data with other ranks release the interpreter's lock. stream() takes it
// again to call `take`.
void bind_values(py::module_& module) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  py::class_<Values> bound(module, "Values");
  bind_inference(bound);
  bound.def("full", &Values::full, NoGil())
      .def(
          "weights",
          [](Values& values, at::ScalarType dtype, const at::Device& device, bool everywhere) {
            const py::gil_scoped_release release;
            return values.weights({dtype, device, everywhere});
          },
          py::arg("dtype"), py::arg("device"), py::arg("everywhere"))
      .def("shapes", &Values::shapes)
      .def("stream",
           [](Values& values, const py::function& take) {
             const py::gil_scoped_release release;
             values.stream([&take](const std::string& name, int64_t begin, const at::Tensor& part) {
               const py::gil_scoped_acquire acquire;
               take(name, begin, part);
             });
           })
      .def("set_gradients", &Values::set_gradients, NoGil())
      .def("set_backward_weight", &Values::set_backward_weight)
      .def("set_closed_by", &Values::set_closed_by)
      .def("gradient",
           [](Values& values, const std::string& param) -> std::optional<at::Tensor> {
             const py::gil_scoped_release release;
             at::Tensor found = values.gradient(param);
             return found.defined() ? std::optional(std::move(found)) : std::nullopt;
           })
      .def("state", &Values::state, NoGil())
      .def("set_state", &Values::set_state, NoGil())
      .def("local_state", &Values::local_state, NoGil())
      .def("set_local_state", &Values::set_local_state, NoGil())
      .def("units_of", &Values::units_of)
      .def("gather", &Values::gather, NoGil())
      .def("release", &Values::release, NoGil())
      .def("keep_views", &keep_views)
      .def("refine_masters", &refine_masters, NoGil())
      .def("let_go", &Values::let_go, NoGil())
      .def("set_to_itself", &Values::set_to_itself)
      .def("shards",
           [](Values& values) {
             std::vector<py::tuple> shards;
             for (auto& [name, param, master, begin] : values.shards(/*hidden=*/true)) {
               shards.push_back(py::make_tuple(name, param, master, begin));
             }
             return shards;
           })
      .def("change_shards", &Values::change_shards, NoGil())
      .def("shard_gradients", [](Values& values) {
        std::vector<std::optional<at::Tensor>> gradients;
        for (at::Tensor& gradient : values.shard_gradients()) {
          gradients.emplace_back();
          if (gradient.defined()) gradients.back() = gradient;
        }
        return gradients;
      });
}

}  // namespace penstock::python
