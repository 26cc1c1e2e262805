#include "penstock/init.h"

#include "python/src/module.h"

namespace py = pybind11;

namespace penstock::python {

// penstock/init.h documents the methods. whole() and broadcast() exchange data with other ranks, so
// they release the interpreter's lock.
void bind_init(py::module_& module) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  py::class_<ShardedInit, std::shared_ptr<ShardedInit>>(module, "ShardedInit")
      .def(py::init<std::shared_ptr<Group>>(), py::arg("group"))
      .def("connect", &ShardedInit::connect)
      .def("open", &ShardedInit::open)
      .def("hollow", &ShardedInit::hollow, py::arg("tensor"), py::arg("path") = "")
      .def("copy", &ShardedInit::copy)
      .def("holds", &ShardedInit::holds)
      .def("whole", &ShardedInit::whole, NoGil())
      .def("scratch", &ShardedInit::scratch)
      .def("keep", &ShardedInit::keep)
      .def("broadcast", &ShardedInit::broadcast, NoGil())
      .def("empty", &ShardedInit::empty);
}

}  // namespace penstock::python
