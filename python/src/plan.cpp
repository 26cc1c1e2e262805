#include "penstock/plan.h"

#include <pybind11/stl.h>

#include "penstock/core.h"
#include "python/src/module.h"
#include "src/plan/cost/mesh_plan.h"

namespace py = pybind11;

namespace penstock::python {

namespace {

// Returns the bytes of each tier per rank and the predicted seconds per step (penstock/plan.h).
py::dict dict_of(const Alternative& one) {
  py::dict dict;
  dict["strategy"] = one.strategy;
  dict["optimizer"] = one.optimizer;
  dict["params"] = one.params;
  dict["gradients"] = one.gradients;
  dict["device"] = one.device;
  dict["host"] = one.host;
  dict["disk"] = one.disk;
  dict["seconds"] = one.seconds;
  dict["longest"] = one.longest;
  dict["fits"] = one.fits;
  dict["tight"] = one.tight;
  dict["over"] = one.over;
  return dict;
}

py::dict report_of(const ModelTree& tree, const PlanQuestion& question) {
  const PlanReport report = plan_report(tree, question);
  py::list alternatives;
  for (const Alternative& one : report.alternatives) alternatives.append(dict_of(one));
  py::dict dict;
  dict["alternatives"] = alternatives;
  dict["same"] = report.same;
  py::list codecs;
  for (const CodecAlternative& one : report.codecs) {
    py::dict best = dict_of(one.best);
    best["codec"] = one.codec;
    best["average"] = one.average;
    codecs.append(best);
  }
  dict["codecs"] = codecs;
  dict["text"] = report.text;
  return dict;
}

py::dict dict_of(const MeshAlternative& one) {
  py::dict dict = dict_of(one.state);
  dict["tensor"] = one.tensor;
  dict["pipeline"] = one.pipeline;
  dict["data"] = one.data;
  dict["node"] = one.node;
  dict["virtual_stages"] = one.virtual_stages;
  dict["micro"] = one.micro;
  dict["accumulate"] = one.accumulate;
  dict["recompute"] = one.recompute;
  dict["params_of_a_rank"] = one.params;
  dict["activations"] = one.activations;
  dict["seconds"] = one.seconds;
  dict["compute"] = one.compute + one.again;
  dict["sums"] = one.sums;
  dict["messages"] = one.messages;
  dict["bubble"] = one.bubble;
  dict["data_waits"] = one.data_waits;
  dict["fits"] = one.fits;
  dict["over"] = one.over;
  dict["why"] = one.why();
  dict["config"] = one.config();
  dict.attr("pop")("longest");  // `longest` and `tight` are about the state alone, not the mesh
  dict.attr("pop")("tight");
  return dict;
}

py::dict meshes_of(const ModelTree& tree, const MeshQuestion& question) {
  const MeshReport report = mesh_report(tree, question);
  py::list alternatives;
  for (const MeshAlternative& one : report.alternatives) alternatives.append(dict_of(one));
  py::dict dict;
  dict["alternatives"] = alternatives;
  dict["text"] = report.text;
  return dict;
}

}  // namespace

void bind_plan(py::module_& module) {
  py::class_<Machine>(module, "Machine")
      .def(py::init<>())
      .def_readwrite("flops", &Machine::flops)
      .def_readwrite("local", &Machine::local)
      .def_readwrite("node", &Machine::node)
      .def_readwrite("device_host", &Machine::device_host)
      .def_readwrite("host_disk", &Machine::host_disk)
      .def_readwrite("host_memory", &Machine::host_memory)
      .def_readwrite("device_memory", &Machine::device_memory)
      .def_readwrite("overlap", &Machine::overlap)
      .def_readwrite("one_row", &Machine::one_row)
      .def_readwrite("rows_16", &Machine::rows_16)
      .def_readwrite("attention", &Machine::attention);
  module.def("read_machine", &read_machine, py::arg("path"), py::arg("otherwise"));
  module.def("strategy_names", &strategy_names);
  module.def(
      "plan_report",
      [](const ModelTree& tree, const Config& config, int world_size, double tokens,
         const Machine& machine) {
        return report_of(tree, {config, world_size, tokens, machine, {}});
      },
      py::arg("tree"), py::arg("config"), py::arg("world_size"), py::arg("tokens"),
      py::arg("machine"));
  module.def(
      "simulated_bubble",
      [](const std::string& schedule, int num_ranks, int num_micro,
         const std::vector<std::pair<double, double>>& stages) {
        std::vector<StageSeconds> seconds;
        for (const auto& [forward, backward] : stages) seconds.push_back({forward, backward});
        return simulated_bubble(schedule, num_ranks, num_micro, seconds);
      },
      py::arg("schedule"), py::arg("num_ranks"), py::arg("num_micro"), py::arg("stages"));
  py::class_<TransformerShape>(module, "TransformerShape")
      .def(py::init<>())
      .def_readwrite("layers", &TransformerShape::layers)
      .def_readwrite("hidden", &TransformerShape::hidden)
      .def_readwrite("heads", &TransformerShape::heads)
      .def_readwrite("sequence", &TransformerShape::sequence)
      .def_readwrite("vocabulary", &TransformerShape::vocabulary);
  py::class_<MeshQuestion>(module, "MeshQuestion")
      .def(py::init([](const Config& config, const Machine& machine) {
             MeshQuestion question;
             question.asked.config = config;
             question.asked.machine = machine;
             return question;
           }),
           py::arg("config"), py::arg("machine"))
      .def_readwrite("shape", &MeshQuestion::shape)
      .def_readwrite("nodes", &MeshQuestion::nodes)
      .def_readwrite("per_node", &MeshQuestion::per_node)
      .def_readwrite("batch", &MeshQuestion::batch)
      .def_readwrite("micro", &MeshQuestion::micro);
  module.def(
      "mesh_report",
      [](const ModelTree& tree, const MeshQuestion& question) { return meshes_of(tree, question); },
      py::arg("tree"), py::arg("question"));
}

}  // namespace penstock::python
