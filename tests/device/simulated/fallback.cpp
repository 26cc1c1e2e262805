#include "tests/device/simulated/fallback.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include <mutex>
#include <utility>

#include "tests/device/simulated/allocator.h"
#include "tests/device/simulated/arena.h"
#include "tests/device/simulated/argument.h"
#include "tests/device/simulated/copies.h"
#include "tests/device/simulated/counting.h"
#include "tests/device/simulated/generator.h"
#include "tests/device/simulated/prediction.h"
#include "tests/device/simulated/stream.h"
#include "tests/device/simulated/traffic.h"

namespace penstock::sim {
namespace {

using torch::jit::Stack;

// The place for result `index` of the kernel; a list of tensors has several views.
struct Output {
  size_t index = 0;
  std::vector<std::optional<View>> tensors;
};

struct Call {
  const c10::OperatorHandle& handle;
  Operator& known;
  Stack arguments;
  c10::Device device;
  c10::Stream stream;

  const c10::FunctionSchema& schema() const { return handle.schema(); }
};

// Returns the device of the tensors, or of a device argument, or the current device. As on CUDA,
// all tensors must be on one device, except numbers and the host tensors that a few operators take.
c10::Device device_for(const Operator& known, const Stack& arguments) {
  std::optional<c10::Device> device, other;
  const auto look = [&](const at::Tensor& tensor) {
    if (on_device(tensor)) {
      if (!device) device = tensor.device();
      if (tensor.device() != *device) other = tensor.device();
    } else if (tensor.dim() > 0 && !known.takes_host_tensors) {
      other = tensor.device();
    }
  };
  for (const c10::IValue& argument : arguments) for_each_tensor(argument, look);
  TORCH_CHECK(!device || !other, known.name,
              ": expected all tensors to be on the same device, found ", *device, " and ", *other);
  for (const c10::IValue& argument : arguments) {
    if (!device && argument.isDevice()) device = argument.toDevice();
  }
  return device && device->has_index() ? *device : sim_device(current_device());
}

void run_kernel(const c10::OperatorHandle& handle, Stack& stack) {
  const at::AutoDispatchBelowADInplaceOrView below;
  handle.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
}

// Returns the argument that the operator returns as result `index`, if there is one.
std::optional<c10::IValue> aliased(const Call& call, size_t index) {
  const auto* result = call.schema().returns()[index].alias_info();
  if (!result) return std::nullopt;
  TORCH_CHECK(result->isWrite(), "[sim] the view operator ", call.known.name, " has no kernel");
  for (size_t i = 0; i < call.arguments.size(); ++i) {
    const auto* argument = call.schema().arguments()[i].alias_info();
    if (argument && *argument == *result) return call.arguments[i];
  }
  return std::nullopt;
}

// Queues the call of an operator that may draw random numbers, and holds the generator for it.
class Draw {
 public:
  Draw(Call& call) : stream_(call.stream) {
    if (!call.known.random || call.known.generator_argument < 0) return;
    c10::IValue& argument = call.arguments[call.known.generator_argument];
    generator_ =
        argument.isGenerator() ? argument.toGenerator() : default_generator(call.device.index());
    TORCH_CHECK(generator_.device() == call.device, call.known.name, ": expected a generator on ",
                call.device, ", found one on ", generator_.device());
    lock_ = std::unique_lock(generator_.mutex());
    argument = impl().for_kernel(stream_);
  }
  ~Draw() {
    if (generator_.defined()) impl().drawn(stream_);
  }
  Draw(const Draw&) = delete;
  Draw& operator=(const Draw&) = delete;

 private:
  DeviceGenerator& impl() {
    return *static_cast<DeviceGenerator*>(generator_.unsafeGetGeneratorImpl());
  }

  c10::Stream stream_;
  at::Generator generator_;
  std::unique_lock<std::mutex> lock_;
};

// ---- asynchronous ----

// Pushes new device tensors for the results onto the stack. Returns where the kernel will put them.
std::vector<Output> allocate_results(const Call& call, const Stack& results, Stack* stack) {
  std::vector<Output> outputs;
  for (size_t i = 0; i < results.size(); ++i) {
    if (auto argument = aliased(call, i)) {
      if (call.known.resizes_outputs) outputs.push_back({i, {View(argument->toTensor())}});
      stack->push_back(std::move(*argument));
    } else if (results[i].isTensor() && results[i].toTensor().defined()) {
      const auto tensor = new_on_device(results[i].toTensor(), call.device);
      outputs.push_back({i, {View(tensor)}});
      stack->emplace_back(tensor);
    } else if (results[i].isTensorList()) {
      c10::List<at::Tensor> list;
      Output output{i, {}};
      for (const at::Tensor& meta : results[i].toTensorList()) {
        list.push_back(meta.defined() ? new_on_device(meta, call.device) : meta);
        const at::Tensor tensor = list.get(list.size() - 1);
        output.tensors.push_back(meta.defined() ? std::optional<View>(tensor) : std::nullopt);
      }
      outputs.push_back(std::move(output));
      stack->emplace_back(std::move(list));
    } else {
      stack->push_back(results[i]);
    }
  }
  return outputs;
}

void store(const at::Tensor& result, const View& output) {
  if (!result.defined()) return;  // a gradient that was not requested
  TORCH_CHECK(result.scalar_type() == output.dtype(), "[sim] the kernel returned ",
              result.scalar_type(), ", but its meta kernel ", output.dtype());
  output.on_shadow().copy_(result);
}

void store(const Stack& results, const std::vector<Output>& outputs) {
  for (const Output& output : outputs) {
    const c10::IValue& result = results[output.index];
    if (result.isTensor()) {
      store(result.toTensor(), *output.tensors.front());
      continue;
    }
    const auto tensors = result.toTensorVector();
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (output.tensors[i]) store(tensors[i], *output.tensors[i]);
    }
  }
}

std::vector<Argument> keep(const Stack& arguments) { return {arguments.begin(), arguments.end()}; }

// `fresh_outputs`: passes empty CPU tensors as outputs, which the kernel resizes.
Stack for_kernel(const c10::OperatorHandle& handle, const std::vector<Argument>& arguments,
                 bool fresh_outputs) {
  Stack values;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (fresh_outputs && handle.schema().arguments()[i].is_out()) {
      values.emplace_back(at::empty({0}, at::TensorOptions().dtype(arguments[i].dtype())));
    } else {
      values.push_back(arguments[i].for_kernel());
    }
  }
  return values;
}

void run_later(const Call& call, const Stack& results, Stack* stack) {
  auto arguments = keep(call.arguments);
  auto outputs = allocate_results(call, results, stack);
  launch(call.stream, call.known.name.c_str(),
         [handle = call.handle, arguments = std::move(arguments), outputs = std::move(outputs),
          fresh_outputs = call.known.resizes_outputs] {
           Stack values = for_kernel(handle, arguments, fresh_outputs);
           run_kernel(handle, values);
           store(values, outputs);
         });
}

// ---- synchronous ----

// For operators that take no generator. While this object exists, the CPU's default generator has
// the state of the device's generator; the destructor swaps the states back.
class Swapped {
 public:
  explicit Swapped(const at::Generator& device) : device_(device) {
    device_.set_state(exchange(device_.get_state()));
  }
  ~Swapped() { device_.set_state(exchange(device_.get_state())); }
  Swapped(const Swapped&) = delete;
  Swapped& operator=(const Swapped&) = delete;

 private:
  static at::Tensor exchange(const at::Tensor& state) {
    at::Generator host = at::detail::getDefaultCPUGenerator();
    at::Tensor before = host.get_state();
    host.set_state(state);
    return before;
  }

  at::Generator device_;
};

// The kernel's results, and the CPU tensors that replace out arguments of unknown size.
struct Computed {
  Stack results;
  std::vector<std::pair<size_t, at::Tensor>> outputs;
  std::exception_ptr error;
};

void compute(const Call& call, const std::vector<Argument>& arguments, Computed& computed) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (call.schema().arguments()[i].is_out() && arguments[i].is_empty_tensor()) {
      const auto fresh = at::empty({0}, at::TensorOptions().dtype(arguments[i].dtype()));
      computed.outputs.emplace_back(i, fresh);
      computed.results.emplace_back(fresh);
    } else {
      computed.results.push_back(arguments[i].for_kernel());
    }
  }
  run_kernel(call.handle, computed.results);
}

at::Tensor upload(const at::Tensor& host, const Call& call) {
  if (!host.defined()) return host;
  auto tensor = new_on_device(host, call.device);
  launch(call.stream, "output", [host, view = View(tensor)] { view.on_shadow().copy_(host); });
  return tensor;
}

c10::IValue upload(const c10::IValue& result, const Call& call) {
  if (result.isTensor()) return upload(result.toTensor(), call);
  if (!result.isTensorList()) return result;
  c10::List<at::Tensor> list;
  for (const at::Tensor& tensor : result.toTensorList()) list.push_back(upload(tensor, call));
  return list;
}

void run_now(const Call& call, Stack* stack) {
  static std::mutex one_swap;
  const auto arguments = keep(call.arguments);
  Computed computed;
  {
    std::unique_lock<std::mutex> lock;
    std::optional<Swapped> swapped;
    if (call.known.random && call.known.generator_argument < 0) {
      lock = std::unique_lock(one_swap);
      swapped.emplace(default_generator(call.device.index()));
    }
    launch(call.stream, call.known.name.c_str(), [&] {
      try {
        compute(call, arguments, computed);
      } catch (...) {  // thrown again by the caller, which waits
        computed.error = std::current_exception();
      }
    });
    count_synchronous_operator(call.known.name);
    synchronize(call.stream, "operator " + call.known.name);
  }
  if (computed.error) std::rethrow_exception(computed.error);
  for (const auto& [i, tensor] : computed.outputs) {
    copy_from_and_resize(tensor, call.arguments[i].toTensor());
  }
  for (size_t i = 0; i < computed.results.size(); ++i) {
    if (auto argument = aliased(call, i)) {
      stack->push_back(std::move(*argument));
    } else {
      stack->push_back(upload(computed.results[i], call));
    }
  }
}

void count(const Call& call, const Stack& stack) {
  const auto results = torch::jit::last(stack, call.schema().returns().size());
  const Traffic traffic = traffic_of(call.schema(), call.arguments, results);
  count_kernel(call.known.name, traffic.bytes);
  if (traffic.temporary == 0) return;
  count_temporary(traffic.temporary);
  note_temporary(call.device.index(), traffic.temporary);
}

}  // namespace

void run_on_device(const c10::OperatorHandle& handle, Stack* stack) {
  Operator& known = describe(handle);
  auto arguments = torch::jit::pop(*stack, handle.schema().arguments().size());
  const c10::Device device = device_for(known, arguments);
  const c10::DeviceGuard guard(device);
  Call call{handle, known, std::move(arguments), device, current_stream(device.index())};
  const auto results = predict(handle, known, call.arguments);
  const Draw draw(call);
  if (results) {
    run_later(call, *results, stack);
  } else {
    run_now(call, stack);
  }
  count(call, *stack);
}

}  // namespace penstock::sim
