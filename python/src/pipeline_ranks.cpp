#include "src/engine/mesh/pipeline_ranks.h"

#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>

#include "python/src/kept.h"
#include "python/src/module.h"

namespace py = pybind11;

namespace penstock::python {

namespace {

// None stands for an undefined tensor.
using Tensors = std::vector<std::optional<at::Tensor>>;

Tensors out_of(const std::vector<at::Tensor>& tensors) {
  Tensors out;
  for (const at::Tensor& one : tensors) {
    out.push_back(one.defined() ? std::optional<at::Tensor>(one) : std::nullopt);
  }
  return out;
}

// Runs a backward without the interpreter's lock. Throws an exception of Python code as it is.
template <class Work>
void run_backward(const Work& work) {
  try {
    const py::gil_scoped_release release;
    work();
  } catch (python_error& error) {
    error.restore();
    throw py::error_already_set();
  }
}

void backward_inputs(PipelineRanks& ranks, const Action& action, std::vector<at::Tensor> outputs,
                     const Tensors& gradients, std::vector<at::Tensor> inputs) {
  PipelineRanks::StageGraph graph{std::move(outputs), {}, std::move(inputs)};
  for (const auto& one : gradients) graph.gradients.push_back(one.value_or(at::Tensor()));
  run_backward([&] { ranks.backward_inputs(action, std::move(graph)); });
}

void backward_weights(PipelineRanks& ranks, const Action& action) {
  run_backward([&] { ranks.backward_weights(action); });
}

// Detaches the tensors from their Python objects, because freeing a Python object on another thread
// needs the interpreter's lock.
std::vector<at::Tensor> into(const Tensors& tensors) {
  std::vector<at::Tensor> in;
  for (const auto& one : tensors) in.push_back(one ? one->detach() : at::Tensor());
  return in;
}

auto share_outputs(PipelineRanks& ranks, const py::bytes& text, const Tensors& tensors) {
  const StageMessage own{text, into(tensors)};
  StageMessage shared;
  {
    const py::gil_scoped_release release;
    shared = ranks.share_outputs(own);
  }
  return std::make_pair(py::bytes(shared.text), out_of(shared.tensors));
}

}  // namespace

void bind_pipeline_ranks(py::module_& module) {
  py::class_<Action>(module, "StageAction")
      .def_readonly("stage", &Action::stage)
      .def_readonly("forward", &Action::forward)
      .def_readonly("micro", &Action::micro)
      .def_property_readonly("splits",
                             [](const Action& one) { return one.part != BackwardPart::kAll; })
      .def_property_readonly("is_last", &Action::is_last);
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<PipelineRanks, Kept<PipelineRanks>>(module, "PipelineRanks")
      .def(py::init<const Core&>(), py::arg("core"))
      .def_property_readonly("index", &PipelineRanks::index)
      .def_property_readonly("count", &PipelineRanks::count)
      .def_property_readonly("num_stages", &PipelineRanks::num_stages)
      .def_property_readonly("pieces",
                             [](const PipelineRanks& ranks) {
                               std::vector<std::pair<std::string, int>> pieces;
                               for (const StagePiece& one : ranks.pieces()) {
                                 pieces.emplace_back(one.module, one.stage);
                               }
                               return pieces;
                             })
      .def("begin", &PipelineRanks::begin, py::arg("num_micro"), py::arg("trains"), no_gil)
      .def("start", &PipelineRanks::start, py::arg("action"))
      .def(
          "receive",
          [](PipelineRanks& ranks, const Action& action) {
            StageMessage message;
            {
              const py::gil_scoped_release release;
              message = ranks.receive(action);
            }
            return std::make_pair(py::bytes(message.text), out_of(message.tensors));
          },
          py::arg("action"))
      .def(
          "send",
          [](PipelineRanks& ranks, const Action& action, const py::bytes& text,
             const Tensors& tensors) { ranks.send(action, {text, into(tensors)}); },
          py::arg("action"), py::arg("text"), py::arg("tensors"))
      .def("backward_inputs", &backward_inputs, py::arg("action"), py::arg("outputs"),
           py::arg("gradients"), py::arg("inputs"))
      .def("backward_weights", &backward_weights, py::arg("action"))
      .def("end_backward", &PipelineRanks::end_backward, py::arg("action"), no_gil)
      .def("end", &PipelineRanks::end, no_gil)
      .def("share_outputs", &share_outputs, py::arg("text"), py::arg("tensors"))
      .def(
          "set_buffers",
          [](PipelineRanks& ranks,
             const std::vector<std::tuple<std::string, int, at::Tensor>>& buffers) {
            std::vector<StageBuffer> those;
            for (const auto& [name, stage, values] : buffers) {
              those.push_back({name, stage, values});
            }
            ranks.set_buffers(std::move(those));
          },
          py::arg("buffers"))
      .def("bring_buffers", &PipelineRanks::bring_buffers, no_gil);
}

}  // namespace penstock::python
