#include "src/engine/mesh/sequence_ranks.h"

#include <pybind11/stl.h>

#include "python/src/kept.h"
#include "python/src/module.h"

namespace py = pybind11;

namespace penstock::python {

// Functions that exchange data with the sequence ranks release the interpreter's lock.
void bind_sequence_ranks(py::module_& module) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<SequenceRanks, Kept<SequenceRanks>>(module, "SequenceRanks")
      .def(py::init<const Core&, int>(), py::arg("core"), py::arg("num_neighbours"), no_gil)
      .def_property_readonly("index", &SequenceRanks::index)
      .def_property_readonly("count", &SequenceRanks::count)
      .def("all_to_all", &SequenceRanks::all_to_all, py::arg("part"), py::arg("cut_dim"),
           py::arg("join_dim"), no_gil)
      .def("ring_attention", &SequenceRanks::ring_attention, py::arg("query"), py::arg("key"),
           py::arg("value"), py::arg("attended"), py::arg("scale"), no_gil)
      .def("sum_losses", &SequenceRanks::sum_losses, py::arg("addend"), no_gil)
      .def("compare", &SequenceRanks::compare, py::arg("inputs"), py::arg("others"), no_gil);
}

}  // namespace penstock::python
