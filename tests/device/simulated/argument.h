#pragma once
// An argument of an operator, kept until the operator's kernel runs.
#include <ATen/core/ivalue.h>

#include <functional>
#include <variant>
#include <vector>

#include "tests/device/simulated/view.h"

namespace penstock::sim {

// Calls `each` for every tensor in the value, also in lists. Skips undefined tensors.
void for_each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& each);

class Argument {
 public:
  // Reads the values of host tensors now, so later changes by the caller do not reach the kernel.
  explicit Argument(const c10::IValue& value);

  // Returns the value, with CPU tensors over the device's memory. Call it on a stream only.
  c10::IValue for_kernel() const;

  // Returns whether it is a device tensor without memory, such as an out argument of unknown size.
  bool is_empty_tensor() const;
  at::ScalarType dtype() const { return std::get<View>(tensors_.front()).dtype(); }

 private:
  enum class Kind { kPlain, kTensor, kTensors, kOptionalTensors, kDevice };
  using Element = std::variant<View, at::Tensor>;

  static Element element(const at::Tensor& tensor);
  static at::Tensor for_kernel(const Element& element);

  Kind kind_ = Kind::kPlain;
  c10::IValue plain_;
  std::vector<Element> tensors_;
};

}  // namespace penstock::sim
