#include "src/engine/mesh/tensor_ranks.h"

#include <pybind11/stl.h>

#include "python/src/kept.h"
#include "python/src/module.h"

namespace py = pybind11;

namespace penstock::python {

namespace {

// Returns name -> (dim, each rank's ranges [begin, end) along dim) for the cut parameters. Whole
// parameters whose gradients are addends have the dim -1 and no ranges.
py::dict cuts_of(const TensorRanks& ranks) {
  py::dict cuts;
  for (const auto& [name, cut] : ranks.cuts()) {
    std::vector<std::vector<std::pair<int64_t, int64_t>>> ranges;
    const bool is_cut = cut.kind == TensorCut::kCut;
    for (int rank = 0; is_cut && rank < ranks.count(); ++rank) {
      ranges.push_back(cut.ranges(rank, ranks.count()));
    }
    cuts[py::str(name)] = py::make_tuple(is_cut ? cut.dim : -1, ranges);
  }
  return cuts;
}

}  // namespace

// Functions that exchange data with the tensor ranks release the interpreter's lock.
void bind_tensor_ranks(py::module_& module) {
  py::class_<TensorModule>(module, "TensorModule")
      .def_readonly("name", &TensorModule::name)
      .def_readonly("style", &TensorModule::style)
      .def("with_style",
           [](TensorModule how, const std::string& style) {
             how.style = style;
             return how;
           })
      .def_readonly("transposed", &TensorModule::transposed)
      .def_readonly("heads", &TensorModule::heads)
      .def_readonly("size", &TensorModule::size)
      .def_readwrite("gathered", &TensorModule::gathered);
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<TensorRanks, Kept<TensorRanks>>(module, "TensorRanks")
      .def(py::init<const Core&>(), py::arg("core"))
      .def_property_readonly("index", &TensorRanks::index)
      .def_property_readonly("count", &TensorRanks::count)
      .def_property_readonly("modules", &TensorRanks::modules)
      .def_property_readonly("cuts", &cuts_of)
      .def("all_of", &TensorRanks::all_of, py::arg("what"), py::arg("values"), no_gil)
      .def("linear", &TensorRanks::linear, py::arg("how"), py::arg("input"), py::arg("weight"),
           py::arg("bias"), no_gil)
      .def("cut_logits", &TensorRanks::cut_logits, py::arg("how"), py::arg("input"),
           py::arg("weight"), py::arg("bias"), no_gil)
      .def("whole_logits", &TensorRanks::whole_logits, py::arg("how"), py::arg("logits"), no_gil)
      .def(
          "cross_entropy",
          [](const TensorRanks& ranks, const TensorModule& how, const at::Tensor& logits,
             const at::Tensor& target, const py::dict& options) {
            const CrossEntropyOptions chosen = cross_entropy_options(options);
            const py::gil_scoped_release release;
            return ranks.cross_entropy(how, logits, target, chosen);
          },
          py::arg("how"), py::arg("logits"), py::arg("target"), py::arg("options"))
      .def("cut_tokens", &TensorRanks::cut_tokens, py::arg("whole"), no_gil)
      .def("whole_tokens", &TensorRanks::whole_tokens, py::arg("part"), no_gil)
      .def("gather_tokens", &TensorRanks::gather_tokens, py::arg("name"), py::arg("part"), no_gil)
      .def("embedding", &TensorRanks::embedding, py::arg("how"), py::arg("ids"), py::arg("weight"),
           py::arg("padding_idx"), no_gil)
      .def("set_checking", &TensorRanks::set_checking, py::arg("checks"))
      .def("compare", &TensorRanks::compare, py::arg("inputs"), py::arg("others"), py::arg("draws"),
           no_gil);
}

}  // namespace penstock::python
