#include "penstock/group.h"
#include "src/comm/shm/one_host.h"

#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "python/src/kept.h"
#include "python/src/module.h"

namespace py = pybind11;

namespace penstock::python {

namespace {

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000.0));
}

}  // namespace

// Times are in seconds. on_one_host() returns (group, "") or (None, reason). The reason is "" if
// the ranks are on several hosts.
void bind_group(py::module_& module) {
  py::class_<Group, std::shared_ptr<Group>>(module, "Group")
      .def_static(
          "from_process_group",
          [](const c10::intrusive_ptr<c10d::ProcessGroup>& group, double timeout_s,
             const c10::intrusive_ptr<c10d::ProcessGroup>& downward,
             std::function<Group::ProcessGroups()> connect, double warn_s,
             const std::string& report_dir) {
            return kept(Group::from_process_group(group, milliseconds(timeout_s), downward,
                                                  std::move(connect),
                                                  {milliseconds(warn_s), report_dir}));
          },
          py::arg("process_group"), py::arg("timeout_s"), py::arg("downward"), py::arg("connect"),
          py::arg("warn_s"), py::arg("report_dir"))
      .def_static(
          "on_one_host",
          [](const c10::intrusive_ptr<c10d::Store>& store, std::pair<int, int> rank_of,
             double timeout_s, double warn_s, const std::string& report_dir) {
            std::string why_not;
            std::shared_ptr<Group> group;
            {
              const py::gil_scoped_release free;
              group =
                  group_on_one_host(store, rank_of.first, rank_of.second, milliseconds(timeout_s),
                                    {milliseconds(warn_s), report_dir}, &why_not);
            }
            return std::pair(kept(std::move(group)), why_not);
          },
          py::arg("store"), py::arg("rank_of"), py::arg("timeout_s"), py::arg("warn_s"),
          py::arg("report_dir"))
      .def_static("alone", &Group::alone)
      .def("set_device_groups", &Group::set_device_groups, py::arg("make"))
      .def("close", &Group::close, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("transport", &Group::transport)
      .def_property_readonly("rank", &Group::rank)
      .def_property_readonly("size", &Group::size);
  // Returns seconds. If torch does not bind a back end's class, Python cannot read its `options`.
  module.def(
      "back_end_timeout_s",
      [](const c10::intrusive_ptr<c10d::Backend>& back_end) {
        return std::chrono::duration<double>(back_end->getBackendOptions()->timeout).count();
      },
      py::arg("back_end"));
}

}  // namespace penstock::python
