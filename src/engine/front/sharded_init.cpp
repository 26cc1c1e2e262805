#include "penstock/init.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
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
    "each rank has only a shard of it. Read or load it inside `with penstock.init():`; for "
    "numpy(), "
    "tolist(), print() and data_ptr(), clone() it there.";

// The memory or the files of one `path`.
struct InitStore {
  mem::Tiers tiers;
  mem::DiskTraffic traffic{tiers};

  explicit InitStore(const std::string& path) {
    if (path.empty()) return;
    mem::DiskOptions options;
    options.paths = split(path, ':');
    tiers.disk.emplace(options);
  }
};

struct ShardPart {
  // The storage of the hollow tensor. The storage's address is the key in `parts`, and the weak
  // reference keeps the address from being reused. A strong reference would keep the storage alive
  // after the model dropped it.
  c10::weak_intrusive_ptr<c10::StorageImpl> storage{c10::intrusive_ptr<c10::StorageImpl>()};
  at::ScalarType dtype = at::kFloat;
  int64_t numel = 0;
  InitStore* place = nullptr;
  mem::Buffer own;  // this rank's bytes

  void read() {
    place->traffic.fetch(own, mem::Account::kParam);
    place->traffic.wait_read(own);
  }
};

c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

}  // namespace

struct ShardedInit::Impl {
  std::shared_ptr<Group> group;
  std::optional<comm::Channel> channel;
  comm::Members members;
  std::map<std::string, InitStore> places;  // by path; outlives the parts
  std::unordered_map<const c10::StorageImpl*, ShardPart> parts;

  explicit Impl(std::shared_ptr<Group> ranks) { connect(std::move(ranks)); }

  void connect(std::shared_ptr<Group> ranks) {
    if (group && (ranks->size() != group->size() || ranks->rank() != group->rank())) {
      throw RuntimeFault(concat("[engine::init] this process is rank ", ranks->rank(), " of ",
                                ranks->size(), ", but was rank ", group->rank(), " of ",
                                group->size(), " in the first init(). Parameters of that init() ",
                                "need their engine before the ranks of a process change"));
    }
    channel.emplace(*ranks, "init");
    members = {{}, ranks->rank()};
    for (int rank = 0; rank < ranks->size(); ++rank) members.ranks.push_back(rank);
    group = std::move(ranks);  // the channel of the former group is gone
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

  void settle() {
    for (auto& [path, place] : places) place.traffic.settle();
  }

  // Frees the parts of tensors that the model has dropped.
  void forget_dropped() {
    settle();
    std::erase_if(parts, [](const auto& one) { return one.second.storage.expired(); });
  }

  // Gives the tensor a storage without memory, and room for this rank's part of it.
  ShardPart& add(const at::Tensor& tensor, const std::string& path) {
    forget_dropped();
    ShardPart part;
    part.dtype = tensor.scalar_type();
    part.numel = tensor.numel();
    part.place = &places.try_emplace(path, path).first->second;
    part.own.numel = part_bytes(part) / 4;
    part.own.tier = path.empty() ? Tier::kHost : Tier::kDisk;
    if (part.own.on_disk()) part.own.offset = part.place->tiers.disk->claim(part.own.bytes());
    engine::own_storage(tensor, exec::dtype_of(tensor.scalar_type()), tensor.sizes());
    c10::StorageImpl* storage = storage_of(tensor);
    exec::set_guard(*storage, kGuard);
    using Strong = c10::intrusive_ptr<c10::StorageImpl>;
    part.storage = c10::weak_intrusive_ptr<c10::StorageImpl>(Strong::reclaim_copy(storage));
    return parts.emplace(storage, std::move(part)).first->second;
  }

  // Sets this rank's part to the `size` bytes at `from`.
  static void write(ShardPart& part, const void* from, int64_t size) {
    part.place->traffic.settle();
    part.place->traffic.make_room(part.own, mem::Account::kParam);
    std::memcpy(part.own.data().host(), from, size);
    part.place->traffic.put_back(part.own);
  }

  ShardPart& of(const at::Tensor& tensor) {
    const auto found = parts.find(storage_of(tensor));
    PENSTOCK_ASSERT(found != parts.end(), "[engine::ShardedInit] the tensor is not hollow");
    return found->second;
  }
};

ShardedInit::ShardedInit(std::shared_ptr<Group> group)
    : state_(std::make_unique<Impl>(std::move(group))) {}

ShardedInit::~ShardedInit() = default;

void ShardedInit::connect(std::shared_ptr<Group> group) { state_->connect(std::move(group)); }

void ShardedInit::open(const std::string& path) { state_->places.try_emplace(path, path); }

void ShardedInit::hollow(const at::Tensor& tensor, const std::string& path) {
  const at::Tensor values = tensor.detach().reshape({-1}).contiguous();
  state_->add(tensor, path);
  keep(tensor, values);
}

at::Tensor ShardedInit::copy(const at::Tensor& tensor) {
  ShardPart& from = state_->of(tensor);
  const at::Tensor twin = at::empty({from.numel}, at::TensorOptions(from.dtype));
  std::string path;
  for (const auto& [folders, place] : state_->places) {
    if (&place == from.place) path = folders;
  }
  ShardPart& to = state_->add(twin, path);
  from.read();
  Impl::write(to, from.own.data().host(), from.own.bytes());
  from.place->traffic.let_go(from.own);
  return twin.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
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
  part.read();
  std::memcpy(full + state_->members.index * bytes, part.own.data().host(), bytes);
  part.place->traffic.let_go(part.own);
  state_->channel->all_gather("init", state_->members, {{full, bytes}});
  return values;
}

void ShardedInit::keep(const at::Tensor& tensor, const at::Tensor& values) {
  ShardPart& part = state_->of(tensor);
  const auto bytes = part.numel * static_cast<int64_t>(c10::elementSize(part.dtype));
  mem::trim_heap(bytes);
  const int64_t begin = std::min(bytes, state_->members.index * part.own.bytes());
  const int64_t end = std::min(bytes, begin + part.own.bytes());
  const auto* from = static_cast<const char*>(values.const_data_ptr());
  Impl::write(part, from + begin, end - begin);
}

at::Tensor ShardedInit::take(const at::Tensor& tensor) {
  at::Tensor values =
      whole(tensor).as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  InitStore* place = state_->of(tensor).place;
  place->traffic.settle();
  state_->parts.erase(storage_of(tensor));
  place->tiers.host.trim();
  return values;
}

void ShardedInit::broadcast(const at::Tensor& bytes) const {
  state_->channel->broadcast("init", state_->members, bytes.data_ptr(),
                             static_cast<int64_t>(bytes.nbytes()));
}

bool ShardedInit::empty() {
  state_->forget_dropped();
  std::erase_if(state_->places, [this](const auto& one) {
    return std::none_of(state_->parts.begin(), state_->parts.end(),
                        [&](const auto& part) { return part.second.place == &one.second; });
  });
  return state_->parts.empty();
}

}  // namespace penstock
