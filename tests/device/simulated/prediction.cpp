#include "tests/device/simulated/prediction.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/enum_tag.h>
#include <ATen/native/Resize.h>

#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "tests/device/simulated/argument.h"

namespace penstock::sim {
namespace {

using torch::jit::Stack;

constexpr size_t kRemembered = 20000;

// The properties of the arguments as bytes. Calls with the same key give results with the same
// shapes, strides and dtypes.
class Key {
 public:
  explicit Key(const std::string& name) : bytes_(name) { bytes_ += '|'; }

  // Returns false for a value that may affect the results in a way that the key does not show.
  bool add(const c10::IValue& value) {
    if (value.isTensor() || value.isTensorList() || value.isOptionalTensorList()) {
      add_tensors(value);
    } else if (value.isNone() || value.isGenerator()) {
      bytes_ += 'N';
    } else if (value.isInt()) {
      add_raw('i', value.toInt());
    } else if (value.isDouble()) {
      add_raw('d', value.toDouble());
    } else if (value.isBool()) {
      add_raw('b', value.toBool());
    } else if (value.isIntList()) {
      add_all('I', value.toIntList());
    } else if (value.isDoubleList()) {
      add_all('D', value.toDoubleList());
    } else if (value.isBoolList()) {
      add_all('B', value.toBoolList());
    } else if (value.isString()) {
      add_raw('s', value.toStringRef().size());
      bytes_ += value.toStringRef();
    } else if (value.isDevice()) {
      bytes_ += 'v';
    } else {
      return false;
    }
    return true;
  }

  const std::string& bytes() const { return bytes_; }

 private:
  template <typename T>
  void add_raw(char kind, const T& value) {
    bytes_ += kind;
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }

  template <typename T>
  void add_all(char kind, const c10::List<T>& list) {
    add_raw(kind, list.size());
    for (const T value : list) add_raw('.', value);
  }

  void add_tensor(const at::Tensor& tensor) {
    if (!tensor.defined()) {
      bytes_ += 'u';
      return;
    }
    add_raw(on_device(tensor) ? 't' : 'h', tensor.scalar_type());
    add_raw('w', tensor.unsafeGetTensorImpl()->is_wrapped_number());
    add_raw('n', tensor.dim());
    const size_t dims = tensor.dim() * sizeof(int64_t);
    bytes_.append(reinterpret_cast<const char*>(tensor.sizes().data()), dims);
    bytes_.append(reinterpret_cast<const char*>(tensor.strides().data()), dims);
  }

  void add_tensors(const c10::IValue& value) {
    if (value.isTensor()) {
      add_tensor(value.toTensor());
    } else if (value.isTensorList()) {
      add_raw('T', value.toTensorList().size());
      for (const at::Tensor& tensor : value.toTensorList()) add_tensor(tensor);
    } else {
      add_raw('O', value.toOptionalTensorList().size());
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
        add_tensor(tensor.value_or(at::Tensor()));
      }
    }
  }

  std::string bytes_;
};

// Caches results by key, and operators by the address of their name.
struct Memory {
  std::mutex mutex;
  std::unordered_map<std::string, std::shared_ptr<const Stack>> results;  // guarded by mutex
  std::unordered_map<const c10::OperatorName*, std::unique_ptr<Operator>> operators;  // likewise
};

Memory& memory() {
  static Memory* const memory = new Memory;
  return *memory;
}

std::shared_ptr<const Stack> remembered(const std::string& key) {
  const std::lock_guard lock(memory().mutex);
  const auto found = memory().results.find(key);
  return found == memory().results.end() ? nullptr : found->second;
}

void remember(const std::string& key, std::shared_ptr<const Stack> results) {
  const std::lock_guard lock(memory().mutex);
  if (memory().results.size() >= kRemembered) memory().results.clear();
  memory().results[key] = std::move(results);
}

at::Tensor to_meta(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  const bool wrapped = tensor.unsafeGetTensorImpl()->is_wrapped_number();
  if (!on_device(tensor) && tensor.dim() == 0) return tensor;  // a number
  auto meta =
      at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type());
  if (wrapped) meta.unsafeGetTensorImpl()->set_wrapped_number(true);
  return meta;
}

c10::IValue to_meta(const c10::IValue& value) {
  if (value.isTensor()) return to_meta(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorList()) list.push_back(to_meta(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
      list.push_back(tensor ? std::optional(to_meta(*tensor)) : std::nullopt);
    }
    return list;
  }
  if (value.isDevice()) return c10::Device(at::kMeta);
  if (value.isGenerator()) return {};
  return value;
}

bool writes(const c10::FunctionSchema& schema, size_t argument) {
  const auto* alias = schema.arguments()[argument].alias_info();
  return alias && alias->isWrite();
}

// Resizes out arguments to the sizes that the meta kernel chose. Returns whether any size changed.
bool resize_outputs(const c10::FunctionSchema& schema, const Stack& arguments, const Stack& metas) {
  bool resized = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!writes(schema, i) || !arguments[i].isTensor() || !arguments[i].toTensor().defined()) {
      continue;
    }
    const at::Tensor& meta = metas[i].toTensor();
    const at::Tensor& tensor = arguments[i].toTensor();
    if (meta.sizes() == tensor.sizes()) continue;
    resized = true;
    at::native::resize_(tensor, meta.sizes(), std::nullopt);
    if (meta.strides() != tensor.strides()) tensor.as_strided_(meta.sizes(), meta.strides());
  }
  return resized;
}

// Returns whether the error says that there is no meta kernel, or that it would need the values.
bool has_no_meta(const std::exception& error) {
  if (dynamic_cast<const c10::NotImplementedError*>(&error)) return true;
  const std::string text = error.what();
  for (const char* sign : {"ould not run", "NotImplemented", "Meta", "meta", "data_ptr"}) {
    if (text.find(sign) != std::string::npos) return true;
  }
  return false;
}

bool is_kept(const c10::IValue& result) {
  return result.isTensor() || result.isTensorList() || result.isInt() || result.isNone();
}

// On the CPU, the statistics of a norm have the dtype of its input unless the weights are wider. On
// all other devices they are fp32.
void correct_statistics(const Stack& arguments, Stack& results) {
  const auto dtype = arguments[0].toTensor().scalar_type();
  bool mixed = false;
  const auto look = [&](const at::Tensor& tensor) { mixed |= tensor.scalar_type() != dtype; };
  for (const c10::IValue& argument : arguments) for_each_tensor(argument, look);
  if (mixed) return;
  for (const size_t i : {1, 2}) results[i] = results[i].toTensor().to(dtype);
}

Stack run_on_meta(const c10::OperatorHandle& handle, Stack metas) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const c10::impl::ExcludeDispatchKeyGuard no_modes(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  handle.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &metas);
  return metas;
}

}  // namespace

Operator& describe(const c10::OperatorHandle& handle) {
  const std::lock_guard lock(memory().mutex);
  auto& known = memory().operators[&handle.operator_name()];
  if (known) return *known;
  known = std::make_unique<Operator>();
  known->name = c10::toString(handle.operator_name());
  const auto is = [&known](const char* part) {
    return known->name.find(part) != std::string::npos;
  };
  // The CPU's flash attention is tagged as random, but draws only for dropout, which it does not
  // support.
  known->random = handle.hasTag(at::Tag::nondeterministic_seeded) && !is("flash_attention_for_cpu");
  const auto& arguments = handle.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() == "generator") known->generator_argument = static_cast<int>(i);
  }
  known->gives_statistics = !is("backward") && (is("native_layer_norm") ||
                                                is("native_group_norm") || is("native_batch_norm"));
  known->resizes_outputs = is("mse_loss.out") || is("smooth_l1_loss.out");
  known->takes_host_tensors = is("index") || is("_foreach_");
  known->synchronous = (known->random && known->generator_argument < 0) ||
                       handle.hasTag(at::Tag::data_dependent_output) ||
                       handle.hasTag(at::Tag::dynamic_output_shape);
  return *known;
}

std::optional<Stack> predict(const c10::OperatorHandle& handle, Operator& known,
                             const Stack& arguments) {
  if (known.synchronous) return std::nullopt;
  Key key(known.name);
  bool cacheable = true;
  for (const c10::IValue& argument : arguments) cacheable = cacheable && key.add(argument);
  if (cacheable) {
    if (const auto results = remembered(key.bytes())) return *results;
  }
  Stack metas, results;
  for (const c10::IValue& argument : arguments) metas.push_back(to_meta(argument));
  try {
    results = run_on_meta(handle, metas);
  } catch (const std::exception& error) {
    if (!has_no_meta(error)) throw;
    known.synchronous = true;
    return std::nullopt;
  }
  if (known.gives_statistics) correct_statistics(arguments, results);
  const auto& schema = handle.schema();
  if (resize_outputs(schema, arguments, metas)) cacheable = false;
  for (size_t i = 0; i < results.size(); ++i) {
    if (schema.returns()[i].alias_info()) results[i] = {};
    if (is_kept(results[i])) continue;
    known.synchronous = true;
    return std::nullopt;
  }
  if (cacheable) remember(key.bytes(), std::make_shared<const Stack>(results));
  return results;
}

}  // namespace penstock::sim
