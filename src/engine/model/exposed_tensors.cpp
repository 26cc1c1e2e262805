#include "src/engine/model/exposed_tensors.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StorageImpl.h>

#include <algorithm>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/device/torch_compat.h"

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
  device::clear_guard(*storage);
  storage->set_allocator(allocator);
  storage->set_resizable(true);
}

void LentShards::add(const std::string& name, const at::Tensor& master) {
  // An empty shard has no memory of the engine.
  if (master.numel() == 0) return;
  c10::Storage window = master.storage();
  void* const memory = window.mutable_data();
  shards_.push_back({name, master, std::move(window), memory});
}

void LentShards::show() {
  for (const LentShard& shard : shards_) {
    c10::StorageImpl* storage = shard.window.unsafeGetStorageImpl();
    storage->set_data_ptr_noswap(c10::DataPtr(shard.memory, storage->device()));
    device::clear_guard(*storage);
  }
}

void LentShards::hide() {
  for (const LentShard& shard : shards_) {
    c10::StorageImpl* storage = shard.window.unsafeGetStorageImpl();
    storage->set_data_ptr_noswap(c10::DataPtr(nullptr, storage->device()));
    device::set_guard(
        *storage, concat("[engine::shards] the optimizer's shard of \"", shard.name,
                         "\" was read or written outside step(), where it has no memory. Use the "
                         "shard inside the optimizer's step() or in a public method of its "
                         "class. Use the model's parameter inside "
                         "engine.gathered(write=True)"));
  }
}

void LentShards::check() const {
  for (const LentShard& shard : shards_) {
    const c10::StorageImpl* now = shard.master.storage().unsafeGetStorageImpl();
    if (now == shard.window.unsafeGetStorageImpl()) continue;  // is_alias_of() would read memory
    throw RuntimeFault(concat("[engine::shards] the optimizer gave its shard of \"", shard.name,
                              "\" new memory (p.data = x), which the engine does not see. Copy "
                              "the values instead: p.data.copy_(x)"));
  }
}

void LentShards::take_back() {
  std::vector<at::Tensor> tensors;
  for (const LentShard& shard : std::exchange(shards_, {})) {
    tensors.push_back(shard.master);
    shard.window.unsafeGetStorageImpl()->set_data_ptr_noswap(
        c10::DataPtr(nullptr, shard.window.device()));
  }
  engine::take_back(tensors);
}

void take_back(std::vector<at::Tensor>& lent) {
  for (const at::Tensor& tensor : lent) {
    c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
    storage->set_data_ptr_noswap(c10::DataPtr(nullptr, storage->device()));
    device::set_guard(
        *storage,
        "[engine::take_back] this shard of a parameter or of its gradient belonged to "
        "an engine that is closed, or to a step that has ended. Its values are "
        "gone. Clone shards that you still need after the step.");
  }
  lent.clear();
}

}  // namespace penstock::engine
