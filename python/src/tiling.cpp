#include "src/tiles/tiling.h"

#include <pybind11/stl.h>

#include "python/src/module.h"

namespace py = pybind11;

namespace penstock::python {

namespace {

at::Tensor or_undefined(const std::optional<at::Tensor>& tensor) {
  return tensor.value_or(at::Tensor());
}

// If `values` is unset, the parameter's own values are used (Bias, src/tiles/tiling.h).
Bias bias_of(const std::optional<at::Tensor>& param, const std::optional<at::Tensor>& values) {
  return {or_undefined(param), or_undefined(values ? values : param)};
}

}  // namespace

CrossEntropyOptions cross_entropy_options(const py::dict& options) {
  return {options["ignore_index"].cast<int64_t>(), options["reduction"].cast<std::string>(),
          options["label_smoothing"].cast<double>()};
}

void bind_tiling(py::module_& module) {
  using MaybeTensor = std::optional<at::Tensor>;
  py::class_<Tiles>(module, "Tiles")
      .def(py::init<const Core&, const std::string&>(), py::arg("core"), py::arg("param"))
      .def_static("names", &Tiles::names, py::arg("core"))
      .def_property_readonly("count", &Tiles::count)
      .def(
          "linear",
          [](const Tiles& tiles, const at::Tensor& input, const MaybeTensor& bias,
             const MaybeTensor& values) {
            const py::gil_scoped_release release;
            return tiles.linear(input, bias_of(bias, values));
          },
          py::arg("input"), py::arg("bias") = py::none(), py::arg("bias_values") = py::none())
      .def("embedding", &Tiles::embedding, py::arg("ids"), py::arg("padding_idx"),
           py::arg("scale_grad_by_freq"), py::call_guard<py::gil_scoped_release>())
      .def(
          "cross_entropy",
          [](const Tiles& tiles, const at::Tensor& input, const MaybeTensor& bias,
             const MaybeTensor& values, const at::Tensor& target, const py::dict& options) {
            const CrossEntropyOptions chosen = cross_entropy_options(options);
            const auto dtype = options["dtype"].cast<at::ScalarType>();
            const py::gil_scoped_release release;
            return tiles.cross_entropy(input, bias_of(bias, values), target, chosen, dtype);
          },
          py::arg("input"), py::arg("bias"), py::arg("bias_values"), py::arg("target"),
          py::arg("options"));
}

}  // namespace penstock::python
