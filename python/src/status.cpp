#include "src/base/status.h"

#include <pybind11/stl.h>

#include "python/src/module.h"

namespace py = pybind11;

namespace penstock::python {

// Ages are in seconds. `numbers` has the names and units of kStepNumbers. NaN means unknown.
void bind_status(py::module_& module) {
  py::class_<RankStatus> status(module, "RankStatus");
  py::class_<RankStatus::Line>(status, "Line")
      .def_readonly("step", &RankStatus::Line::step)
      .def_readonly("age_s", &RankStatus::Line::age_s)
      .def_readonly("text", &RankStatus::Line::text);
  py::class_<RankStatus::Lane>(status, "Lane")
      .def_readonly("name", &RankStatus::Lane::name)
      .def_readonly("waits", &RankStatus::Lane::waits)
      .def_readonly("peer", &RankStatus::Lane::peer)
      .def_readonly("sequence", &RankStatus::Lane::sequence)
      .def_readonly("line", &RankStatus::Lane::line);
  status.def_static("read", &RankStatus::read, py::arg("path"))
      .def_readonly("rank", &RankStatus::rank)
      .def_readonly("size", &RankStatus::size)
      .def_readonly("pid", &RankStatus::pid)
      .def_readonly("run", &RankStatus::run)
      .def_readonly("at", &RankStatus::at)
      .def_readonly("lanes", &RankStatus::lanes)
      .def_readonly("log", &RankStatus::log)
      .def_readonly("roster", &RankStatus::roster)
      .def_property_readonly("numbers", [](const RankStatus& self) {
        py::dict dict;  // empty before the first step
        if (self.step_age_s < 0.0) return dict;
        dict["age_s"] = self.step_age_s;
        for (size_t i = 0; i < kStepNumbers.size(); ++i) dict[kStepNumbers[i]] = self.numbers[i];
        return dict;
      });
  module.attr("STATUS_FILE") = kStatusFile;
}

}  // namespace penstock::python
