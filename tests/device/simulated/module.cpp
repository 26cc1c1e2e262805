// The Python module _sim: the functions that tests/device/sim.py needs in addition to torch's own
// interfaces.
#include <ATen/Context.h>
#include <torch/csrc/utils/pybind.h>

#include "tests/device/simulated/collectives.h"
#include "tests/device/simulated/control.h"

namespace penstock::sim {
namespace {

namespace py = pybind11;

py::tuple pair(const Tally& tally) { return py::make_tuple(tally.count, tally.bytes); }

py::dict pairs(const std::map<std::string, Tally>& tallies) {
  py::dict dict;
  for (const auto& [name, tally] : tallies) dict[name.c_str()] = pair(tally);
  return dict;
}

py::dict counters_as_dict() {
  const Counters now = counters();
  py::dict dict;
  dict["kernels"] = now.kernels;
  dict["host_waits"] = now.host_waits;
  dict["host_waits_by_name"] = now.host_waits_by_name;
  dict["new_events"] = now.new_events;
  dict["h2d"] = pair(now.h2d);
  dict["d2h"] = pair(now.d2h);
  dict["d2d"] = pair(now.d2d);
  dict["collectives"] = pair(now.collectives);
  dict["collectives_by_name"] = pairs(now.collectives_by_name);
  dict["traffic"] = pair(now.traffic);
  dict["traffic_by_name"] = pairs(now.traffic_by_name);
  dict["temporaries"] = pair(now.temporaries);
  dict["synchronous_operators"] = now.synchronous_operators;
  return dict;
}

bool ends() {
#if PY_VERSION_HEX >= 0x030d0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

// NCCL's recorder takes the lock of the interpreter to note who called a collective. A thread that
// waits for the device with this lock therefore blocks all collectives.
void take_interpreter() {
  if (ends()) return;  // a thread that asks for the lock now is ended
  const py::gil_scoped_acquire held;
}

PYBIND11_MODULE(_sim, module) {
  set_issue_hook(&take_interpreter);
  module.attr("DEVICES") = kDevices;
  module.def("counters", &counters_as_dict);
  module.def("reset_counters", &reset_counters);
  module.def("set_seed", &set_seed);
  module.def("set_delays_us", &set_delays_us);
  module.def("set_memory_limit", &set_memory_limit);
  module.def("set_pinning_fails", &set_pinning_fails);
  module.def("set_issue_delay_us", &set_issue_delay_us);
  module.def("set_allocations_wait", &set_allocations_wait);
  module.def("set_pinned_offset", &set_pinned_offset);
  module.def("pinned_bytes", &pinned_bytes);
  module.def("set_pageable_copies_are_late", &set_pageable_copies_are_late);
  module.def("write_wrongly", &write_wrongly);
  module.def("reset_errors", &reset_errors);
  module.def("is_forked", &is_forked);
  module.def("contexts", &contexts);
  module.def("forget_contexts", &forget_contexts);
  module.def("default_generator", [](c10::DeviceIndex device) {
    return at::globalContext().defaultGenerator({c10::kPrivateUse1, device});
  });
  const py::call_guard<py::gil_scoped_release> waits;
  module.def("check_redzones", &check_redzones, waits);
  module.def("drain", &drain, waits);
  py::module_::import("torch._C._distributed_c10d");  // defines Backend
  module.def("make_collectives", [](int rank, int size, py::object make) {
    // Never deleted: a thread may drop the last reference after the interpreter has ended.
    auto* const held = new py::object(std::move(make));
    return make_collectives(rank, size, [held] {
      const py::gil_scoped_acquire lock;
      return (*held)().cast<c10::intrusive_ptr<c10d::Backend>>();
    });
  });
}

}  // namespace
}  // namespace penstock::sim
