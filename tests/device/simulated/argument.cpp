#include "tests/device/simulated/argument.h"

namespace penstock::sim {

void for_each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& each) {
  const auto visit = [&each](const at::Tensor& tensor) {
    if (tensor.defined()) each(tensor);
  };
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorList()) visit(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
      if (tensor) visit(*tensor);
    }
  }
}

Argument::Argument(const c10::IValue& value) {
  if (value.isTensor()) {
    kind_ = Kind::kTensor;
    tensors_.push_back(element(value.toTensor()));
  } else if (value.isTensorList()) {
    kind_ = Kind::kTensors;
    for (const at::Tensor& tensor : value.toTensorList()) tensors_.push_back(element(tensor));
  } else if (value.isOptionalTensorList()) {
    kind_ = Kind::kOptionalTensors;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
      tensors_.push_back(element(tensor.value_or(at::Tensor())));
    }
  } else if (value.isDevice()) {
    kind_ = Kind::kDevice;
  } else {
    plain_ = value;
  }
}

c10::IValue Argument::for_kernel() const {
  switch (kind_) {
    case Kind::kTensor:
      return for_kernel(tensors_.front());
    case Kind::kTensors: {
      c10::List<at::Tensor> list;
      for (const Element& one : tensors_) list.push_back(for_kernel(one));
      return list;
    }
    case Kind::kOptionalTensors: {
      c10::List<std::optional<at::Tensor>> list;
      for (const Element& one : tensors_) {
        const at::Tensor tensor = for_kernel(one);
        list.push_back(tensor.defined() ? std::optional(tensor) : std::nullopt);
      }
      return list;
    }
    case Kind::kDevice:
      return c10::Device(at::kCPU);
    case Kind::kPlain:
      break;
  }
  return plain_;
}

bool Argument::is_empty_tensor() const {
  if (kind_ != Kind::kTensor) return false;
  const auto* view = std::get_if<View>(&tensors_.front());
  return view && !view->has_memory();
}

Argument::Element Argument::element(const at::Tensor& tensor) {
  if (on_device(tensor)) return View(tensor);
  if (!tensor.defined()) return tensor;
  at::Tensor copy = tensor.detach().clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return copy;
}

at::Tensor Argument::for_kernel(const Element& element) {
  if (const auto* view = std::get_if<View>(&element)) return view->on_shadow();
  return std::get<at::Tensor>(element);
}

}  // namespace penstock::sim
