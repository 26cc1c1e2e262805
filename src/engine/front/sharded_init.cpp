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
#include "src/ckpt/weights_file.h"
#include "src/comm/channel.h"
#include "src/device/torch_compat.h"
#include "src/engine/model/adoption.h"
#include "src/engine/step/unit_order.h"
#include "src/mem/disk_traffic.h"

namespace penstock {

namespace {

constexpr const char* kGuard =
    "[engine::init] this parameter was built under penstock.init(): until penstock.initialize() "
    "each rank has only a shard of it. Read or load it inside `with penstock.init():`, and "
    "clone() it there before you call numpy(), tolist(), print() or data_ptr().";

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
  // after the model has dropped it.
  c10::weak_intrusive_ptr<c10::StorageImpl> storage{c10::intrusive_ptr<c10::StorageImpl>()};
  at::ScalarType dtype = at::kFloat;
  int64_t numel = 0;
  InitStore* place = nullptr;
  std::optional<c10::Device> device;  // on which the tensor will train
  mem::Buffer own;                    // this rank's bytes, unless the values are in a file
  std::optional<FileValues> file;

  int64_t element_bytes() const { return static_cast<int64_t>(c10::elementSize(dtype)); }
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
                                group->size(), " in the first init(). Call initialize() for the ",
                                "model of that init() before you change the process group"));
    }
    channel.emplace(*ranks, "init");
    members = Members::all(ranks->rank(), ranks->size());
    group = std::move(ranks);  // the channel of the old group no longer exists
  }

  int64_t part_bytes(const ShardPart& part) const {
    const int64_t bytes = part.numel * part.element_bytes();
    return (bytes + 4 * members.size() - 1) / (4 * members.size()) * 4;
  }

  // Makes a one-dimensional tensor of the values, with memory for the padded parts of all ranks.
  at::Tensor scratch(const ShardPart& part) const {
    const int64_t size = part.element_bytes();
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
  ShardPart& add(const at::Tensor& tensor, const InitPlace& place) {
    forget_dropped();
    ShardPart part;
    part.dtype = tensor.scalar_type();
    part.numel = tensor.numel();
    part.place = &places.try_emplace(place.path, place.path).first->second;
    part.device = place.device;
    part.own.numel = part_bytes(part) / 4;
    part.own.tier = place.path.empty() ? Tier::kHost : Tier::kDisk;
    engine::own_storage(tensor, exec::dtype_of(tensor.scalar_type()), tensor.sizes(),
                        tensor.is_meta() ? c10::Device(at::kCPU) : tensor.device());
    c10::StorageImpl* storage = storage_of(tensor);
    device::set_guard(*storage, kGuard);
    using Strong = c10::intrusive_ptr<c10::StorageImpl>;
    part.storage = c10::weak_intrusive_ptr<c10::StorageImpl>(Strong::reclaim_copy(storage));
    return parts.emplace(storage, std::move(part)).first->second;
  }

  // Sets this rank's part to the `size` bytes at `from`.
  static void write(ShardPart& part, const void* from, int64_t size) {
    part.file.reset();
    part.place->traffic.settle();
    if (part.own.on_disk() && part.own.offset < 0) {
      part.own.offset = part.place->tiers.disk->claim(part.own.bytes());
    }
    part.place->traffic.make_room(part.own, mem::Account::kParam);
    std::memcpy(part.own.data().host(), from, size);
    part.place->traffic.put_back(part.own);
  }

  // Copies this rank's bytes to `to`.
  void read_own(ShardPart& part, char* to) const {
    if (part.file) {
      const int64_t bytes = part.numel * part.element_bytes();
      const int64_t begin = std::min(bytes, members.index * part.own.bytes());
      const int64_t count = std::min(bytes - begin, part.own.bytes()) / part.element_bytes();
      return read_file(part, begin / part.element_bytes(), count, part.dtype, to);
    }
    part.place->traffic.fetch(part.own, mem::Account::kParam);
    part.place->traffic.wait_read(part.own);
    std::memcpy(to, part.own.data().host(), static_cast<size_t>(part.own.bytes()));
    part.place->traffic.let_go(part.own);
  }

  static void read_file(const ShardPart& part, int64_t begin, int64_t numel, at::ScalarType into,
                        void* to) {
    const FileValues& from = *part.file;
    const auto size = static_cast<int64_t>(c10::elementSize(from.dtype));
    from.file->read(from.offset + begin * size, numel, from.dtype, into, to);
  }

  at::Tensor whole(const at::Tensor& tensor) {
    ShardPart& part = of(tensor);
    const at::Tensor values = scratch(part);
    const int64_t bytes = part.own.bytes();
    auto* full = static_cast<char*>(values.data_ptr());
    read_own(part, full + members.index * bytes);
    channel->all_gather("init", members, {{full, bytes}});
    return values;
  }

  // Frees this rank's bytes.
  static void let_go(ShardPart& part) {
    part.place->traffic.settle();
    part.place->traffic.drop(part.own);
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

void ShardedInit::hollow(const at::Tensor& tensor, const InitPlace& place) {
  const at::Tensor values = tensor.detach().reshape({-1}).contiguous();
  state_->add(tensor, place);
  keep(tensor, values);
}

void ShardedInit::read_from(const at::Tensor& tensor, const FileValues& values,
                            const InitPlace& place) {
  ShardPart& part = holds(tensor) ? state_->of(tensor) : state_->add(tensor, place);
  PENSTOCK_ASSERT(tensor.numel() == part.numel && tensor.is_contiguous(),
                  "[engine::ShardedInit] the tensor does not fill its storage");
  Impl::let_go(part);
  part.place->tiers.host.trim();
  part.file = values;
}

bool ShardedInit::in_file(const at::Tensor& tensor) const {
  return holds(tensor) && state_->of(tensor).file;
}

FileValues ShardedInit::file_of(const at::Tensor& tensor) const {
  FileValues found = state_->of(tensor).file.value();
  found.offset += tensor.storage_offset() * static_cast<int64_t>(c10::elementSize(found.dtype));
  return found;
}

void ShardedInit::read(const at::Tensor& tensor, int64_t begin, const at::Tensor& to) const {
  Impl::read_file(state_->of(tensor), tensor.storage_offset() + begin, to.numel(), at::kFloat,
                  to.data_ptr());
}

int64_t ShardedInit::held_bytes(const at::Tensor& tensor) const {
  const ShardPart& part = state_->of(tensor);
  return part.file || part.own.on_disk() ? 0 : part.own.bytes();
}

c10::Device ShardedInit::device_of(const at::Tensor& tensor) const {
  return state_->of(tensor).device.value_or(tensor.device());
}

at::Tensor ShardedInit::copy(const at::Tensor& tensor) {
  ShardPart& from = state_->of(tensor);
  const at::Tensor twin = at::empty({from.numel}, tensor.options().dtype(from.dtype));
  std::string path;
  for (const auto& [folders, place] : state_->places) {
    if (&place == from.place) path = folders;
  }
  ShardPart& to = state_->add(twin, {path, from.device});
  if (from.file) {
    to.file = from.file;
  } else {
    std::string bytes(static_cast<size_t>(from.own.bytes()), '\0');
    state_->read_own(from, bytes.data());
    Impl::write(to, bytes.data(), from.own.bytes());
  }
  return twin.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
}

bool ShardedInit::holds(const at::Tensor& tensor) const {
  return state_->parts.contains(storage_of(tensor));
}

at::Tensor ShardedInit::scratch(const at::Tensor& tensor) const {
  const ShardPart& part = state_->of(tensor);
  if (tensor.is_cpu()) return state_->scratch(part);
  return at::empty({part.numel}, tensor.options().dtype(part.dtype));
}

at::Tensor ShardedInit::whole(const at::Tensor& tensor) const {
  return state_->whole(tensor).to(tensor.device());
}

void ShardedInit::keep(const at::Tensor& tensor, const at::Tensor& given) {
  ShardPart& part = state_->of(tensor);
  const at::Tensor values = given.cpu();
  const int64_t bytes = part.numel * part.element_bytes();
  mem::trim_heap(bytes);
  const int64_t begin = std::min(bytes, state_->members.index * part.own.bytes());
  const int64_t end = std::min(bytes, begin + part.own.bytes());
  const auto* from = static_cast<const char*>(values.const_data_ptr());
  Impl::write(part, from + begin, end - begin);
}

at::Tensor ShardedInit::take(const at::Tensor& tensor) {
  at::Tensor values =
      state_->whole(tensor).as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  drop(tensor);
  return values;
}

void ShardedInit::drop(const at::Tensor& tensor) {
  InitStore* place = state_->of(tensor).place;
  place->traffic.settle();
  state_->parts.erase(storage_of(tensor));
  place->tiers.host.trim();
}

std::vector<std::string> ShardedInit::share(const std::string& text) const {
  return engine::share_text("init", text, [&](const std::string& label, const std::string& mine) {
    return state_->channel->share(label, state_->members, mine);
  });
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
