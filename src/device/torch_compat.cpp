#include "src/device/torch_compat.h"

#include <torch/version.h>

#include <mutex>

namespace penstock::device {

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 12

// torch 2.11 can set the flag that clear_guard() clears, but has no function that clears it. An
// explicit template instantiation may name private members. The one below gives access to two such
// members; it does not compile if torch renames them.
namespace {

template <auto kFlag, auto kRefresh>
struct DataAccess {
  friend void permit(c10::StorageImpl& storage) {
    storage.*kFlag = false;
    (storage.*kRefresh)();
  }
};

void permit(c10::StorageImpl& storage);

template struct DataAccess<&c10::StorageImpl::throw_on_immutable_data_ptr_,
                           &c10::StorageImpl::refresh_has_data_ptr_check>;

}  // namespace

void clear_guard(c10::StorageImpl& storage) { permit(storage); }

#else

void clear_guard(c10::StorageImpl& storage) { storage.clear_data_ptr_access_error_msg_(); }

#endif

void set_data(const at::Tensor& tensor, const at::Tensor& data) {
  if (tensor.device() == data.device()) return tensor.set_data(data);
  // The existing gradient accumulator expects the former device.
  if (torch::autograd::AutogradMeta* meta = torch::autograd::impl::get_autograd_meta(tensor)) {
    const std::lock_guard<std::mutex> lock(meta->mutex_);
    meta->grad_accumulator_.reset();
  }
  tensor.unsafeGetTensorImpl()->shallow_copy_from(data.getIntrusivePtr());
}

}  // namespace penstock::device
