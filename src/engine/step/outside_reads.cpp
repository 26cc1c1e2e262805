#include "src/engine/step/outside_reads.h"

#include <ATen/core/ivalue.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <utility>

namespace penstock::engine {

namespace {

thread_local OutsideReads* watching = nullptr;  // dispatch keys are set per thread

void look_at_all(const c10::IValue& value) {
  if (value.isTensor()) {
    watching->look_at(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) watching->look_at(tensor);
  }
}

void look_then_run(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::DeferredInit);
  if (watching != nullptr) {
    const size_t num_arguments = op.schema().arguments().size();
    for (size_t i = stack->size() - num_arguments; i < stack->size(); ++i) look_at_all((*stack)[i]);
  }
  op.callBoxed(stack);
}

// Registered at the first use. So if a program never trains with moving parameters, it can use the
// dispatch key for something else.
void register_fallback() {
  static const auto library = [] {
    auto lib = std::make_unique<torch::Library>(torch::Library::IMPL, "_",
                                                c10::DispatchKey::DeferredInit, __FILE__, __LINE__);
    lib->fallback(torch::CppFunction::makeFromBoxedFunction<&look_then_run>());
    return lib;
  }();
}

}  // namespace

OutsideReads::OutsideReads(std::unordered_map<const c10::StorageImpl*, int> unit_of_storage,
                           std::function<void(int)> found)
    : unit_of_storage_(std::move(unit_of_storage)), found_(std::move(found)), outer_(watching) {
  register_fallback();
  watching = this;
  c10::impl::tls_set_dispatch_key_included(c10::DispatchKey::DeferredInit, true);
}

OutsideReads::~OutsideReads() {
  watching = outer_;
  if (watching == nullptr) {
    c10::impl::tls_set_dispatch_key_included(c10::DispatchKey::DeferredInit, false);
  }
}

void OutsideReads::look_at(const at::Tensor& tensor) const {
  if (!tensor.defined() || !tensor.has_storage()) return;
  c10::StorageImpl* storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  if (storage->_mutable_data_ptr_no_checks().get() != nullptr) return;
  const auto found = unit_of_storage_.find(storage);
  if (found != unit_of_storage_.end()) found_(found->second);
}

}  // namespace penstock::engine
