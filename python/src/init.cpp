#include "penstock/init.h"

#include <ATen/ops/empty.h>
#include <pybind11/stl.h>

#include "python/src/kept.h"
#include "python/src/module.h"
#include "src/ckpt/weights_file.h"

namespace py = pybind11;

namespace penstock::python {

namespace {

at::Tensor read_whole(const WeightsFile& file, const std::vector<int64_t>& shape,
                      at::ScalarType dtype, int64_t offset) {
  at::Tensor values = at::empty(shape, at::TensorOptions(dtype));
  file.read(offset, values.numel(), dtype, dtype, values.data_ptr());
  return values;
}

void bind_weights_file(py::module_& module) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  py::class_<WeightsFile, std::shared_ptr<WeightsFile>>(module, "WeightsFile")
      .def(py::init<std::string>(), py::arg("path"))
      .def("read", &read_whole, py::arg("shape"), py::arg("dtype"), py::arg("offset"), NoGil())
      .def("print", &WeightsFile::print, NoGil());
}

}  // namespace

// penstock/init.h documents the methods. whole() and broadcast() exchange data with other ranks, so
// they release the interpreter's lock.
void bind_init(py::module_& module) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  bind_weights_file(module);
  py::class_<ShardedInit, std::shared_ptr<ShardedInit>>(module, "ShardedInit")
      .def(py::init([](std::shared_ptr<Group> group) {
             return kept(std::make_shared<ShardedInit>(std::move(group)));
           }),
           py::arg("group"))
      .def("connect", &ShardedInit::connect)
      .def("open", &ShardedInit::open)
      .def(
          "hollow",
          [](ShardedInit& self, const at::Tensor& tensor, const std::string& path,
             std::optional<at::Device> device) { self.hollow(tensor, {path, device}); },
          py::arg("tensor"), py::arg("path") = "", py::arg("device") = py::none())
      .def(
          "read_from",
          [](ShardedInit& self, const at::Tensor& tensor, std::shared_ptr<WeightsFile> file,
             at::ScalarType dtype, int64_t offset, const std::string& path,
             std::optional<at::Device> device) {
            self.read_from(tensor, {std::move(file), dtype, offset}, {path, device});
          },
          py::arg("tensor"), py::arg("file"), py::arg("dtype"), py::arg("offset"), py::arg("path"),
          py::arg("device"))
      .def("in_file", &ShardedInit::in_file)
      .def("device_of", &ShardedInit::device_of)
      .def("copy", &ShardedInit::copy)
      .def("holds", &ShardedInit::holds)
      .def("whole", &ShardedInit::whole, NoGil())
      .def("scratch", &ShardedInit::scratch)
      .def("keep", &ShardedInit::keep)
      .def("share", &ShardedInit::share, NoGil())
      .def("broadcast", &ShardedInit::broadcast, NoGil())
      .def("empty", &ShardedInit::empty);
}

}  // namespace penstock::python
