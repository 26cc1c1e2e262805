#include "penstock/init.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/comm/channel.h"
#include "src/engine/model/adoption.h"
#include "src/exec/torch_compat.h"
#include "src/mem/disk_traffic.h"

namespace penstock {

namespace {

constexpr const char* kGuard =
    "[engine::init] this parameter was built under penstock.init(): until penstock.initialize() "
    "each rank has only a shard of it. Read or load it inside `with penstock.init():`.";

struct ShardPart {
  // The storage of the hollow tensor. The storage's address is the key in `parts`, and the weak
  // reference keeps the address from being reused. A strong reference would keep the storage alive
  // after the model dropped it.
  c10::weak_intrusive_ptr<c10::StorageImpl> storage{c10::intrusive_ptr<c10::StorageImpl>()};
  at::ScalarType dtype = at::kFloat;
  int64_t numel = 0;
  mem::Buffer own;  // this rank's bytes
};

c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

}  // namespace

struct ShardedInit::Impl {
  std::shared_ptr<Group> group;
  comm::Channel channel;
  comm::Members members;
  mem::Tiers tiers;
  mem::DiskTraffic traffic;
  std::unordered_map<const c10::StorageImpl*, ShardPart> parts;

  Impl(std::shared_ptr<Group> ranks, const std::string& path)
      : group(std::move(ranks)),
        channel(*group, "init"),
        members{{}, group->rank()},
        traffic(tiers) {
    for (int rank = 0; rank < group->size(); ++rank) members.ranks.push_back(rank);
    if (path.empty()) return;
    mem::DiskOptions options;
    options.paths = split(path, ':');
    tiers.disk.emplace(options);
  }

  int64_t part_bytes(const ShardPart& part) const {
    const auto bytes = part.numel * static_cast<int64_t>(c10::elementSize(part.dtype));
    return (bytes + 4 * members.size() - 1) / (4 * members.size()) * 4;
  }

  // Makes a one-dimensional tensor of the values, with memory for the padded parts of all ranks.
  at::Tensor scratch(const ShardPart& part) const {
    const auto size = static_cast<int64_t>(c10::elementSize(part.dtype));
    const int64_t padded = (part_bytes(part) * members.size() + size - 1) / size;
    return at::empty({padded}, at::TensorOptions(part.dtype)).narrow(0, 0, part.numel);
  }

  // Frees the parts of tensors that the model has dropped.
  void forget_dropped() {
    traffic.settle();
    std::erase_if(parts, [](const auto& one) { return one.second.storage.expired(); });
  }

  ShardPart& of(const at::Tensor& tensor) {
    const auto found = parts.find(storage_of(tensor));
    PENSTOCK_ASSERT(found != parts.end(), "[engine::ShardedInit] the tensor is not hollow");
    return found->second;
  }
};

ShardedInit::ShardedInit(std::shared_ptr<Group> group, const std::string& path)
    : state_(std::make_unique<Impl>(std::move(group), path)) {}

ShardedInit::~ShardedInit() = default;

void ShardedInit::hollow(const at::Tensor& tensor) {
  state_->forget_dropped();
  ShardPart part;
  part.dtype = tensor.scalar_type();
  part.numel = tensor.numel();
  part.own.numel = state_->part_bytes(part) / 4;
  part.own.tier = state_->tiers.disk ? Tier::kDisk : Tier::kHost;
  if (part.own.on_disk()) part.own.offset = state_->tiers.disk->claim(part.own.bytes());
  const at::Tensor values = tensor.detach().reshape({-1}).contiguous();
  engine::own_storage(tensor, exec::dtype_of(tensor.scalar_type()), tensor.sizes());
  c10::StorageImpl* storage = storage_of(tensor);
  exec::set_guard(*storage, kGuard);
  using Strong = c10::intrusive_ptr<c10::StorageImpl>;
  part.storage = c10::weak_intrusive_ptr<c10::StorageImpl>(Strong::reclaim_copy(storage));
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
  ShardPart& part = state_->of(tensor);
  const at::Tensor values = state_->scratch(part);
  const int64_t bytes = part.own.bytes();
  auto* full = static_cast<char*>(values.data_ptr());
  state_->traffic.fetch(part.own, mem::Account::kParam);
  state_->traffic.wait_read(part.own);
  std::memcpy(full + state_->members.index * bytes, part.own.data().host(), bytes);
  state_->traffic.let_go(part.own);
  state_->channel.all_gather("init", state_->members, {{full, bytes}});
  return values;
}

void ShardedInit::keep(const at::Tensor& tensor, const at::Tensor& values) {
  ShardPart& part = state_->of(tensor);
  const auto bytes = part.numel * static_cast<int64_t>(c10::elementSize(part.dtype));
  mem::trim_heap(bytes);
  const int64_t begin = std::min(bytes, state_->members.index * part.own.bytes());
  const int64_t end = std::min(bytes, begin + part.own.bytes());
  const auto* from = static_cast<const char*>(values.const_data_ptr());
  state_->traffic.settle();
  state_->traffic.make_room(part.own, mem::Account::kParam);
  std::memcpy(part.own.data().host(), from + begin, end - begin);
  state_->traffic.put_back(part.own);
}

at::Tensor ShardedInit::take(const at::Tensor& tensor) {
  at::Tensor values = whole(tensor).view(tensor.sizes());
  state_->traffic.settle();
  state_->parts.erase(storage_of(tensor));
  state_->tiers.host.trim();
  return values;
}

void ShardedInit::broadcast(const at::Tensor& bytes) const {
  state_->channel.broadcast("init", state_->members, bytes.data_ptr(),
                            static_cast<int64_t>(bytes.nbytes()));
}

bool ShardedInit::empty() const {
  state_->forget_dropped();
  return state_->parts.empty();
}

}  // namespace penstock
