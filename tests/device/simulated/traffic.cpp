#include "tests/device/simulated/traffic.h"

#include <set>

#include "tests/device/simulated/argument.h"

namespace penstock::sim {
namespace {

size_t tensor_bytes(const c10::IValue& value) {
  size_t bytes = 0;
  for_each_tensor(value, [&bytes](const at::Tensor& tensor) { bytes += bytes_touched(tensor); });
  return bytes;
}

// Returns whether the operator writes its first argument without reading it.
bool overwrites(const std::string& name) {
  static const std::set<std::string> names = {
      "aten::fill_",          "aten::zero_",         "aten::normal_",      "aten::uniform_",
      "aten::bernoulli_",     "aten::random_",       "aten::exponential_", "aten::log_normal_",
      "aten::_foreach_zero_", "aten::_foreach_copy_"};
  return names.contains(name);
}

// Returns whether the operator reads only those elements of its first argument that it returns.
bool selects(const std::string& name) {
  return name == "aten::index_select" || name == "aten::embedding" || name == "aten::gather";
}

// Returns how often the operator's kernel reads or writes argument `index`.
size_t passes(const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> arguments,
              size_t index) {
  const c10::Argument& argument = schema.arguments()[index];
  const bool written = argument.alias_info() && argument.alias_info()->isWrite();
  if (!written || argument.is_out()) return 1;
  if (argument.name() == "grads" && schema.name().starts_with("aten::_fused_")) {
    const auto scale = schema.argumentIndexWithName("grad_scale");
    return scale && arguments[*scale].isTensor() ? 2 : 1;  // writes only those that it scales
  }
  return index == 0 && overwrites(schema.name()) ? 1 : 2;
}

// Reductions cast their whole argument to the dtype of the result first. On CUDA, only bf16 and
// fp16 are widened to fp32 by the reduction itself (ATen/native/ReduceOpsUtils.h, make_reduction).
size_t bytes_cast(const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> arguments,
                  c10::ArrayRef<c10::IValue> results) {
  static const std::set<std::string> names = {"aten::sum",  "aten::nansum",
                                              "aten::mean", "aten::linalg_vector_norm",
                                              "aten::prod", "aten::norm"};
  if (!names.contains(schema.name()) || !arguments[0].isTensor() || !results[0].isTensor()) {
    return 0;
  }
  const at::Tensor &from = arguments[0].toTensor(), &to = results[0].toTensor();
  const bool is_low = from.dtype() == at::kHalf || from.dtype() == at::kBFloat16;
  if (from.dtype() == to.dtype() || (is_low && to.dtype() == at::kFloat)) return 0;
  return from.numel() * to.element_size();
}

}  // namespace

size_t bytes_touched(const at::Tensor& tensor) {
  if (!on_device(tensor)) return 0;
  size_t bytes = tensor.element_size();
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.stride(dim) != 0 || tensor.size(dim) == 0) bytes *= tensor.size(dim);
  }
  return bytes;
}

Traffic traffic_of(const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> arguments,
                   c10::ArrayRef<c10::IValue> results) {
  Traffic traffic;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool part = i == 0 && selects(schema.name());
    const size_t bytes = tensor_bytes(part ? results[0] : arguments[i]);
    if (bytes > 0) traffic.bytes += bytes * passes(schema, arguments, i);
  }
  for (size_t i = 0; i < results.size(); ++i) {
    if (!schema.returns()[i].alias_info()) traffic.bytes += tensor_bytes(results[i]);
  }
  if (results.empty() || arguments.empty()) return traffic;
  traffic.temporary = bytes_cast(schema, arguments, results);
  traffic.bytes += 2 * traffic.temporary;  // written, and read
  return traffic;
}

}  // namespace penstock::sim
