#include "src/engine/model/exposed_tensors.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StorageImpl.h>

#include <algorithm>
#include <utility>

#include "src/exec/torch_compat.h"

namespace penstock::engine {

void own_values(const at::Tensor& param, const at::Tensor& values) {
  c10::StorageImpl* storage = param.storage().unsafeGetStorageImpl();
  c10::Allocator* allocator = c10::GetAllocator(storage->device_type());
  const c10::DeviceGuard guard(storage->device());
  c10::DataPtr memory = allocator->allocate(std::max(storage->nbytes(), param.nbytes()));
  at::for_blob(memory.get(), {param.numel()})
      .options(param.options().requires_grad(false))
      .target_device(storage->device())
      .make_tensor()
      .copy_(values.reshape({-1}));
  // The storage is now an ordinary torch storage.
  storage->set_data_ptr_noswap(std::move(memory));
  exec::clear_guard(*storage);
  storage->set_allocator(allocator);
  storage->set_resizable(true);
}

void take_back(std::vector<at::Tensor>& lent) {
  for (const at::Tensor& tensor : lent) {
    c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
    storage->set_data_ptr_noswap(c10::DataPtr(nullptr, storage->device()));
    exec::set_guard(*storage,
                    "[engine::take_back] this shard of a parameter or of its gradient belonged to "
                    "an engine that is closed, or to a step that has ended. Its values are not "
                    "here any more. Clone shards that you need for longer.");
  }
  lent.clear();
}

}  // namespace penstock::engine
