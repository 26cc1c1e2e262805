#include "penstock/group.h"

#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "python/src/module.h"

namespace py = pybind11;

namespace penstock::python {

void bind_group(py::module_& module) {
  py::class_<Group, std::shared_ptr<Group>>(module, "Group")
      .def_static(
          "from_process_group",
          [](const c10::intrusive_ptr<c10d::ProcessGroup>& group, double timeout_s,
             const c10::intrusive_ptr<c10d::ProcessGroup>& downward,
             std::function<Group::ProcessGroups()> connect) {
            const auto milliseconds = static_cast<int64_t>(timeout_s * 1000.0);
            return Group::from_process_group(group, std::chrono::milliseconds(milliseconds),
                                             downward, std::move(connect));
          },
          py::arg("process_group"), py::arg("timeout_s"), py::arg("downward"), py::arg("connect"))
      .def_static("alone", &Group::alone)
      .def("close", &Group::close, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("rank", &Group::rank)
      .def_property_readonly("size", &Group::size);
}

}  // namespace penstock::python
