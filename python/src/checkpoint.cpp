#include "penstock/checkpoint.h"

#include "penstock/checkpoint_files.h"
#include "penstock/optimizer_kinds.h"

#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include "python/src/module.h"

namespace py = pybind11;

namespace penstock::python {

namespace {

// The header penstock/checkpoint.h documents these values. JSON is passed as text.
void bind_values_of(py::module_& module) {
  py::class_<CheckpointTensor>(module, "CheckpointTensor")
      .def(py::init([](std::string role, std::string name, std::vector<int64_t> shape,
                       int64_t begin, int rank, at::Tensor tensor) {
             return CheckpointTensor{
                 std::move(role),  std::move(name), std::move(shape), begin, rank,
                 std::move(tensor)};
           }),
           py::arg("role"), py::arg("name"), py::arg("shape"), py::arg("begin"), py::arg("rank"),
           py::arg("tensor"))
      .def_readonly_static("ALL", &CheckpointTensor::kAll)
      .def_readonly_static("IF_DIFFERENT", &CheckpointTensor::kIfDifferent)
      .def_readonly_static("PIECES", &CheckpointTensor::kPieces)
      .def_readonly("role", &CheckpointTensor::role)
      .def_readonly("name", &CheckpointTensor::name)
      .def_readonly("shape", &CheckpointTensor::shape)
      .def_readonly("rank", &CheckpointTensor::rank)
      .def_readonly("dtype", &CheckpointTensor::dtype);
  py::class_<FoundCheckpoint>(module, "FoundCheckpoint")
      .def_readonly("path", &FoundCheckpoint::path)
      .def_readonly("world", &FoundCheckpoint::world)
      .def_readonly("front", &FoundCheckpoint::front)
      .def_readonly("of_ranks", &FoundCheckpoint::of_ranks)
      .def_readonly("tensors", &FoundCheckpoint::tensors);
}

// Checkpoint files without an engine (penstock/checkpoint_files.h). Dtypes are torch dtypes.
void bind_files(py::module_& module) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  py::class_<StoredTensor>(module, "StoredTensor")
      .def(py::init([](std::string role, std::string name, std::vector<int64_t> shape,
                       at::ScalarType dtype, int same_as) {
             return StoredTensor{std::move(role),  std::move(name), -1,
                                 std::move(shape), dtype,           same_as};
           }),
           py::arg("role"), py::arg("name"), py::arg("shape"), py::arg("dtype"),
           py::arg("same_as") = -1)
      .def_readonly("role", &StoredTensor::role)
      .def_readonly("name", &StoredTensor::name)
      .def_readonly("rank", &StoredTensor::rank)
      .def_readonly("shape", &StoredTensor::shape)
      .def_readonly("dtype", &StoredTensor::dtype);
  py::class_<StoredState>(module, "StoredState")
      .def(py::init<>())
      .def_readwrite("about", &StoredState::about)
      .def_readwrite("state", &StoredState::state)
      .def_readwrite("front", &StoredState::front)
      .def_readwrite("of_rank", &StoredState::of_rank);
  py::class_<CheckpointWriter>(module, "CheckpointWriter")
      .def(py::init([](const std::string& root, const std::string& tag,
                       std::vector<StoredTensor> tensors, const StoredState& state) {
             return std::make_unique<CheckpointWriter>(root, tag, std::move(tensors), state);
           }),
           py::arg("root"), py::arg("tag"), py::arg("tensors"), py::arg("state"))
      .def("write", &CheckpointWriter::write, py::arg("index"), py::arg("values"), NoGil())
      .def("commit", &CheckpointWriter::commit, NoGil());
  py::class_<CheckpointReader>(module, "CheckpointReader")
      .def(py::init<const std::string&, const std::string&>(), py::arg("path"), py::arg("tag") = "")
      .def_property_readonly("path", &CheckpointReader::path)
      .def_property_readonly("tensors", &CheckpointReader::tensors)
      .def_property_readonly("about",
                             [](const CheckpointReader& self) { return self.state().about; })
      .def_property_readonly("state",
                             [](const CheckpointReader& self) { return self.state().state; })
      .def_property_readonly("front",
                             [](const CheckpointReader& self) { return self.state().front; })
      .def_property_readonly("of_rank",
                             [](const CheckpointReader& self) { return self.state().of_rank; })
      .def("read", &CheckpointReader::read, py::arg("index"), NoGil())
      .def("verify", &CheckpointReader::verify, NoGil());
  py::class_<SafetensorsEntry>(module, "SafetensorsEntry")
      .def_readonly("name", &SafetensorsEntry::name)
      .def_readonly("shape", &SafetensorsEntry::shape)
      .def_readonly("dtype", &SafetensorsEntry::dtype)
      .def_readonly("offset", &SafetensorsEntry::offset);
  module.def("moment_names", [] {
    std::vector<std::string> names;
    for (const OptimizerKind& kind : optimizer_kinds()) {
      names.insert(names.end(), kind.moments.begin(), kind.moments.begin() + kind.num_moments());
    }
    return names;
  });
  module.def("read_safetensors_head", &read_safetensors_head, py::arg("path"));
}

}  // namespace

// Functions that wait for disks or ranks release the interpreter's lock. load() takes the lock
// again to call `tensors`, a function from a FoundCheckpoint to the list of its CheckpointTensors.
void bind_checkpoint(py::module_& module) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  bind_values_of(module);
  bind_files(module);
  py::class_<LoadOptions>(module, "LoadOptions")
      .def(py::init([](std::string tag, bool optimizer, bool missing_ok,
                       const std::map<std::string, std::string>& tied, bool frozen) {
             LoadOptions options{std::move(tag), optimizer, {}, missing_ok, {}, frozen};
             for (const auto& [other, own] : tied) options.tied.emplace(own, other);
             return options;
           }),
           py::arg("tag"), py::arg("optimizer"), py::arg("missing_ok"), py::arg("tied"),
           py::arg("frozen") = true)
      .def_readonly("optimizer", &LoadOptions::optimizer);
  py::class_<Checkpoints>(module, "Checkpoints")
      .def(
          "save",
          [](Checkpoints& self, const std::string& path, std::string tag, bool wait,
             std::string front, std::string of_rank, std::vector<CheckpointTensor> tensors,
             std::string problem, bool frozen, bool in_window) {
            const py::gil_scoped_release release;
            return self.save(path, {std::move(tag),
                                    wait,
                                    std::move(front),
                                    std::move(of_rank),
                                    std::move(tensors),
                                    {},
                                    std::move(problem),
                                    frozen,
                                    in_window});
          },
          py::arg("path"), py::arg("tag"), py::arg("wait"), py::arg("front"), py::arg("of_rank"),
          py::arg("tensors"), py::arg("problem"), py::arg("frozen") = true,
          py::arg("in_window") = false)
      .def("taken", &Checkpoints::taken, NoGil())
      .def("wait", &Checkpoints::wait, NoGil())
      .def("ask", &Checkpoints::ask, py::arg("urgency"))
      .def("asked", &Checkpoints::asked)
      .def("failure", &Checkpoints::failure, NoGil())
      .def(
          "load",
          [](Checkpoints& self, const std::string& path, LoadOptions options,
             const py::function& tensors) {
            const py::gil_scoped_release release;
            const auto ask = [&tensors](const FoundCheckpoint& found) {
              const py::gil_scoped_acquire acquire;
              return tensors(found).cast<std::vector<CheckpointTensor>>();
            };
            options.tensors = ask;
            return self.load(path, options);
          },
          py::arg("path"), py::arg("options"), py::arg("tensors"))
      .def_static("any", &Checkpoints::any)
      .def_property_readonly("bytes_held", &Checkpoints::bytes_held)
      .def_property_readonly("bytes_read", &Checkpoints::bytes_read)
      .def_property_readonly("bytes_written", &Checkpoints::bytes_written);
}

}  // namespace penstock::python
