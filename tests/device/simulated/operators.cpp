// The operators with kernels of their own: those that make tensors, views and copies. All others
// use the fallback. Some of them are registered by name, because a composite kernel would otherwise
// take precedence.
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "tests/device/simulated/allocator.h"
#include "tests/device/simulated/copies.h"
#include "tests/device/simulated/fallback.h"
#include "tests/device/simulated/view.h"

namespace penstock::sim {
namespace {

using at::Tensor;

const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>,
             std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return counted(at::detail::empty_generic(sizes, &device_allocator(), kKeys,
                                           c10::dtype_or_default(dtype), format));
}

Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return counted(at::detail::empty_strided_generic(sizes, strides, &device_allocator(), kKeys,
                                                   c10::dtype_or_default(dtype)));
}

Tensor as_strided(const Tensor& tensor, at::SymIntArrayRef sizes, at::SymIntArrayRef strides,
                  std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(tensor, sizes, strides, std::move(offset));
}

Tensor reshape_alias(const Tensor& tensor, at::SymIntArrayRef sizes, at::SymIntArrayRef strides) {
  return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(sizes),
                                    C10_AS_INTARRAYREF_SLOW(strides));
}

Tensor view(const Tensor& tensor, at::SymIntArrayRef sizes) {
  return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(sizes));
}

const Tensor& resize_(const Tensor& tensor, at::SymIntArrayRef sizes,
                      std::optional<at::MemoryFormat> format) {
  return at::native::resize_(tensor, C10_AS_INTARRAYREF_SLOW(sizes), format);
}

Tensor& set_strided(Tensor& tensor, at::Storage storage, c10::SymInt offset,
                    at::SymIntArrayRef sizes, at::SymIntArrayRef strides) {
  return at::cpu::set__symint(tensor, std::move(storage), std::move(offset), sizes, strides);
}

void record_stream(Tensor& tensor, c10::Stream stream) {
  device_allocator().recordStream(tensor.storage().data_ptr(), stream);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", as_strided);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("view", view);
  library.impl("resize_", resize_);
  library.impl("unfold", at::native::unfold);
  library.impl("view_as_real", at::native::view_as_real);
  library.impl("view_as_complex", at::native::view_as_complex);
  library.impl("set_.source_Tensor",
               static_cast<Tensor& (*)(Tensor&, const Tensor&)>(at::native::set_tensor_));
  library.impl("set_.source_Storage", [](Tensor& tensor, at::Storage storage) -> Tensor& {
    return at::native::set_(tensor, std::move(storage));
  });
  library.impl("set_.source_Storage_storage_offset", set_strided);
  library.impl("record_stream", record_stream);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", read_number);
}

// Copies conjugate and negate by themselves. Otherwise torch would first copy to resolve these
// bits, in an endless recursion.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

// Returns whether the fallback is registered by name, because torch's composite kernel would take
// precedence. An operator that also has a CPU kernel must use that kernel (layer_norm would become
// batch_norm, with other bits). Convolutions would need a library of the device, and each foreach
// operator would become about 30 kernels.
bool is_for_fallback(const c10::OperatorHandle& handle) {
  const std::string& name = handle.operator_name().name;
  const std::string& overload = handle.operator_name().overload_name;
  if (!name.starts_with("aten::")) return false;
  if (name.starts_with("aten::_foreach_")) return overload.find("out") == std::string::npos;
  if (name == "aten::convolution" || name == "aten::convolution_backward") return overload.empty();
  return handle.hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
         (handle.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) ||
          handle.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd));
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto handle = dispatcher.findSchema(name);
    if (!handle || !is_for_fallback(*handle)) continue;
    library.impl(c10::toString(name).c_str(),
                 torch::CppFunction::makeFromBoxedFunction<&run_on_device>());
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_device>());
}

// Computes the same as on the CPU. (native_dropout, which accelerators use, draws and rounds
// differently.)
Tensor dropout(const Tensor& input, double probability, bool train) {
  TORCH_CHECK(probability >= 0 && probability <= 1,
              "dropout probability has to be between 0 and 1, but got ", probability);
  if (probability == 0 || !train || input.numel() == 0) return input;
  if (probability == 1) return input.mul(at::zeros({}, input.options()));
  return input.mul(at::empty_like(input).bernoulli_(1 - probability).div_(1 - probability));
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) { library.impl("dropout", dropout); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) { library.impl("dropout", dropout); }

}  // namespace
}  // namespace penstock::sim
