#include "src/comm/shm/one_host.h"

#include <pybind11/stl.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "python/src/module.h"

namespace py = pybind11;

namespace penstock::python {

namespace {

// Calls body() without the interpreter's lock, if this thread holds it.
void unlocked(const std::function<void()>& body) {
  if (!Py_IsInitialized() || PyGILState_Check() == 0) return body();
  const py::gil_scoped_release free;
  body();
}

}  // namespace

// Returns (back end, "") or (None, reason). `timeout_s` in seconds.
void bind_one_host(py::module_& module) {
  module.def(
      "one_host_back_end",
      [](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, double timeout_s) {
        std::string why_not;
        c10::intrusive_ptr<c10d::Backend> made;
        {
          const py::gil_scoped_release free;
          const auto timeout = std::chrono::milliseconds(static_cast<int64_t>(timeout_s * 1e3));
          made = one_host_back_end(store, rank, size, timeout, &why_not, unlocked);
        }
        return std::pair(made, why_not);
      },
      py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout_s"));
}

}  // namespace penstock::python
