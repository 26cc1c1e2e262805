#include "penstock/init.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/comm/channel.h"
#include "src/engine/adopt.h"
#include "src/exec/torch_compat.h"
#include "src/mem/arena.h"

namespace penstock {

namespace {

constexpr const char* kGuard =
    "[engine::init] this parameter was built under penstock.init(): until penstock.initialize() "
    "it is in pieces over the ranks. Read or load it inside `with penstock.init():`.";

struct Part {
  c10::intrusive_ptr<c10::StorageImpl> storage;  // of the hollow tensor, so that its key is unique
  at::ScalarType dtype = at::kFloat;
  int64_t numel = 0;
  at::Tensor bytes;  // this rank's
};

c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

}  // namespace

struct ShardedInit::State {
  std::shared_ptr<Group> group;
  comm::Channel channel;
  comm::Members members;
  std::unordered_map<const c10::StorageImpl*, Part> parts;

  explicit State(std::shared_ptr<Group> ranks)
      : group(std::move(ranks)), channel(*group, "init"), members{{}, group->rank()} {
    for (int rank = 0; rank < group->size(); ++rank) members.ranks.push_back(rank);
  }

  int64_t part_bytes(const Part& part) const {
    const auto bytes = part.numel * static_cast<int64_t>(c10::elementSize(part.dtype));
    return (bytes + members.size() - 1) / members.size();
  }

  // One dimension of values on top of the bytes of every rank's part.
  at::Tensor scratch(const Part& part) const {
    const auto size = static_cast<int64_t>(c10::elementSize(part.dtype));
    const int64_t padded = (part_bytes(part) * members.size() + size - 1) / size;
    return at::empty({padded}, at::TensorOptions(part.dtype)).narrow(0, 0, part.numel);
  }

  const Part& of(const at::Tensor& tensor) const {
    const auto found = parts.find(storage_of(tensor));
    PENSTOCK_ASSERT(found != parts.end(), "[engine::ShardedInit] the tensor is not hollow");
    return found->second;
  }
};

ShardedInit::ShardedInit(std::shared_ptr<Group> group)
    : state_(std::make_unique<State>(std::move(group))) {}

ShardedInit::~ShardedInit() = default;

void ShardedInit::hollow(const at::Tensor& tensor) {
  // Tensors that the model let go of since.
  std::erase_if(state_->parts, [](const auto& one) { return one.second.storage.use_count() == 1; });
  const at::Tensor values = tensor.detach().reshape({-1}).contiguous();
  engine::own_storage(tensor, exec::dtype_of(tensor.scalar_type()));
  c10::StorageImpl* storage = storage_of(tensor);
  exec::set_guard(*storage, kGuard);
  Part part;
  part.storage = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage);
  part.dtype = tensor.scalar_type();
  part.numel = tensor.numel();
  part.bytes = at::empty({state_->part_bytes(part)}, at::TensorOptions(at::kByte));
  state_->parts.emplace(storage, std::move(part));
  keep(tensor, values);
}

bool ShardedInit::holds(const at::Tensor& tensor) const {
  return state_->parts.contains(storage_of(tensor));
}

at::Tensor ShardedInit::scratch(const at::Tensor& tensor) const {
  return state_->scratch(state_->of(tensor));
}

at::Tensor ShardedInit::whole(const at::Tensor& tensor) const {
  const Part& part = state_->of(tensor);
  const at::Tensor values = state_->scratch(part);
  const int64_t bytes = part.bytes.numel();
  auto* full = static_cast<char*>(values.data_ptr());
  std::memcpy(full + state_->members.index * bytes, part.bytes.const_data_ptr(), bytes);
  state_->channel.all_gather("init", state_->members, {{full, bytes}});
  return values;
}

void ShardedInit::keep(const at::Tensor& tensor, const at::Tensor& values) {
  const Part& part = state_->of(tensor);
  const auto bytes = part.numel * static_cast<int64_t>(c10::elementSize(part.dtype));
  mem::trim_heap(bytes);
  const int64_t begin = std::min(bytes, state_->members.index * part.bytes.numel());
  const int64_t end = std::min(bytes, begin + part.bytes.numel());
  const auto* from = static_cast<const char*>(values.const_data_ptr());
  std::memcpy(part.bytes.data_ptr(), from + begin, end - begin);
}

at::Tensor ShardedInit::take(const at::Tensor& tensor) {
  at::Tensor values = whole(tensor).view(tensor.sizes());
  state_->parts.erase(storage_of(tensor));
  return values;
}

void ShardedInit::broadcast(const at::Tensor& bytes) const {
  state_->channel.broadcast("init", state_->members, bytes.data_ptr(),
                            static_cast<int64_t>(bytes.nbytes()));
}

bool ShardedInit::empty() const { return state_->parts.empty(); }

}  // namespace penstock
