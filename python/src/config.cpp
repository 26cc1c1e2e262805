#include "penstock/config.h"

#include <pybind11/stl.h>

#include "python/src/module.h"

namespace py = pybind11;

namespace penstock::python {

void bind_config(py::module_& module) {
  py::class_<Config>(module, "Config")
      .def_static("parse", &Config::parse, py::arg("json_text"))
      .def("json", &Config::json)
      .def("resolve", &Config::resolve, py::arg("world_size"))
      .def_readonly("strategy", &Config::strategy)
      .def_readonly("clip", &Config::clip)
      .def_readonly("seed", &Config::seed)
      .def_property_readonly("timeout_s", [](const Config& c) { return c.comm.timeout_s; })
      .def_property_readonly("accumulate", [](const Config& c) { return c.batch.accumulate; });
  module.def(
      "explain_config",
      [](const std::string& json_text, int world_size) {
        Config config = Config::parse(json_text);
        config.resolve(world_size);
        return config.json();
      },
      py::arg("config_json"), py::arg("world_size"));
  module.def(
      "lr_factor",
      [](const Config& config, int64_t step) { return lr_factor(config.schedule, step); },
      py::arg("config"), py::arg("step"));
}

}  // namespace penstock::python
