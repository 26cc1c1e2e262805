#include "penstock/optimizer_kinds.h"

#include <pybind11/stl.h>

#include <string>
#include <type_traits>
#include <variant>

#include "penstock/error.h"
#include "python/src/module.h"

namespace py = pybind11;

namespace penstock::python {

namespace {

// Returns "type" and every key of its kind, as in the config's "optimizer" section.
py::dict optimizer_section(const OptimizerConfig& optimizer) {
  const OptimizerKind& kind = kind_of(optimizer.type);
  py::dict section;
  section["type"] = kind.name;
  for (const std::string& key : kind.keys) {
    std::visit([&](auto field) { section[key.c_str()] = py::cast(optimizer.*field); },
               optimizer_key(key).field);
  }
  return section;
}

// Accepts a tensor of one element instead of a number.
void read_key(const OptimizerKey& key, const py::object& value, OptimizerConfig* out) {
  try {
    std::visit(
        [&](auto field) {
          auto& at = out->*field;
          at = value.cast<std::remove_reference_t<decltype(at)>>();
        },
        key.field);
  } catch (const py::cast_error&) {
    throw ConfigError("[front::optimizer] \"" + key.name + "\" of a parameter group is " +
                      std::string(py::repr(value)) + ", which is not a valid value of this key");
  }
}

// Reads a torch parameter group; entries that are not keys of the kind are ignored.
OptimizerConfig of_group(const std::string& name, const py::dict& group) {
  const OptimizerKind* kind = find_optimizer(name);
  PENSTOCK_ASSERT(kind != nullptr, "[front::optimizer] no kind " + name);
  OptimizerConfig optimizer = kind->defaults;
  for (const std::string& key : kind->keys) {
    if (group.contains(key)) read_key(optimizer_key(key), group[key.c_str()], &optimizer);
  }
  return optimizer;
}

}  // namespace

void bind_optimizer_kinds(py::module_& module) {
  py::class_<OptimizerConfig> optimizer(module, "OptimizerConfig");
  optimizer.def(py::init(&of_group), py::arg("kind"), py::arg("group"))
      .def_property_readonly("type",
                             [](const OptimizerConfig& self) { return kind_of(self.type).name; })
      .def_property_readonly("section", &optimizer_section)
      .def_property_readonly("moments",  // names of the moments, as in torch
                             [](const OptimizerConfig& self) {
                               const auto& names = kind_of(self.type).moments;
                               return std::vector<std::string>(names.begin(),
                                                               names.begin() + num_moments(self));
                             })
      .def_property_readonly("num_moments",
                             [](const OptimizerConfig& self) { return num_moments(self); });
  for (const OptimizerKey& key : optimizer_keys()) {
    std::visit([&](auto field) { optimizer.def_readonly(key.name.c_str(), field); }, key.field);
  }
  py::class_<OptimizerKind>(module, "OptimizerKind")
      .def_readonly("name", &OptimizerKind::name)
      .def_readonly("keys", &OptimizerKind::keys)
      .def_property_readonly(
          "defaults", [](const OptimizerKind& kind) { return optimizer_section(kind.defaults); });
  py::list kinds;
  for (const OptimizerKind& kind : optimizer_kinds()) {
    kinds.append(py::cast(kind, py::return_value_policy::reference));
  }
  module.attr("OPTIMIZER_KINDS") = py::tuple(kinds);
}

}  // namespace penstock::python
