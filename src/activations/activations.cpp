#include "src/activations/activations.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"

namespace penstock::activations {

namespace {

// Smaller tensors stay where they are, because a disk block or an arena buffer has at least this
// size.
constexpr int64_t kSmallBytes = mem::kBlockBytes;
// Copies keep the alignment of the original, because the order in which kernels sum may depend on
// it.
constexpr int64_t kAlignment = 64;

// The layout of a tensor in its storage.
struct View {
  std::vector<int64_t> sizes, strides;
  at::TensorOptions options;
  int64_t lead = 0;   // elements from an aligned address to the first element
  int64_t span = 0;   // elements from the first to the last element, both included
  bool dense = true;  // true: the whole span is kept; false: only the tensor's elements are kept
};

View view_of(const at::Tensor& tensor) {
  View view{tensor.sizes().vec(), tensor.strides().vec(), tensor.options().requires_grad(false)};
  view.span = 1;
  for (size_t dim = 0; dim < view.sizes.size(); ++dim) {
    view.span += (view.sizes[dim] - 1) * view.strides[dim];
  }
  const auto address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  view.lead = static_cast<int64_t>(address % kAlignment) / tensor.element_size();
  view.dense = view.span <= tensor.numel();
  return view;
}

// Returns the values to keep as a one-dimensional tensor, which is a view for a dense tensor.
at::Tensor content_of(const at::Tensor& tensor, const View& view) {
  return view.dense ? tensor.as_strided({view.span}, {1}, tensor.storage_offset())
                    : tensor.contiguous().view(-1);
}

at::Tensor rebuild(const at::Tensor& content, const View& view) {
  const at::Tensor base = at::empty({view.lead + view.span}, view.options);
  const at::Tensor tensor = base.as_strided(view.sizes, view.strides, view.lead);
  if (view.dense) {
    base.narrow(0, view.lead, view.span).copy_(content);
  } else {
    tensor.copy_(content.view(view.sizes));
  }
  return tensor;
}

bool is_plain(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && tensor.has_storage() && !tensor.is_quantized() &&
         !tensor.is_nested() && !tensor.is_conj() && !tensor.is_neg() && !tensor.is_inference() &&
         !tensor.is_meta() && !tensor.key_set().has(c10::DispatchKey::Python) && tensor.numel() > 0;
}

void check_unchanged(const at::Tensor& tensor, int64_t version, const std::string& who) {
  if (tensor._version() == version) return;
  throw RuntimeFault(concat("[activations::save] ", who,
                            " was changed in place, so the unit cannot be recomputed. Change a "
                            "clone of the input instead, or turn activations.checkpoint off"));
}

}  // namespace

struct Activations::SavedTensor {
  SavedTensor(const at::Tensor& tensor, View lies)
      : source(tensor.tensor_data()),  // shares the version counter, not the graph
        version(tensor._version()),
        begin(tensor.const_data_ptr()),
        dtype(tensor.scalar_type()),
        view(std::move(lies)),
        numel(view.dense ? view.span : tensor.numel()),
        origin(tensor.storage().getWeakStorageImpl()) {}

  // Returns whether `tensor`, which has the same storage, is part of this entry.
  bool holds(const at::Tensor& tensor, const View& other) const {
    if (version != tensor._version() || dtype != tensor.scalar_type()) return false;
    const int64_t first = shift(tensor);
    if (view.dense) return first >= 0 && first + other.span <= numel;
    return first == 0 && view.sizes == other.sizes && view.strides == other.strides;
  }

  // Returns the number of elements from this entry's first element to the tensor's first element.
  int64_t shift(const at::Tensor& tensor) const {
    const auto* const at = static_cast<const char*>(tensor.const_data_ptr());
    return (at - static_cast<const char*>(begin)) / tensor.element_size();
  }

  void put_away(std::shared_ptr<Shelf> shelf) {
    const at::NoGradGuard no_grad;
    parked.emplace(std::move(shelf), content_of(source, view));
    source.reset();
  }

  // Returns the view that begins `after` elements into this entry.
  at::Tensor fetch(const View& as, int64_t after) {
    const at::NoGradGuard no_grad;
    if (source.defined()) {
      check_unchanged(source, version, "an input of a recomputed unit");
      return part(content_of(source, view), as, after);
    }
    if (!parked) {
      throw RuntimeFault(
          "[activations::save] close() has freed the saved inputs that this backward needs. Run "
          "the backward before close()");
    }
    at::Tensor tensor = part(parked->values(), as, after);
    parked->release();
    return tensor;
  }

  at::Tensor part(const at::Tensor& whole, const View& as, int64_t after) const {
    if (!view.dense) return rebuild(whole, as);
    const at::Tensor tensor =
        whole.as_strided(as.sizes, as.strides, whole.storage_offset() + after);
    return rebuild(content_of(tensor, as), as);
  }

  void let_go() {
    source.reset();
    parked.reset();
  }

  at::Tensor source;  // the original, until put_away()
  const int64_t version;
  const void* const begin;
  const at::ScalarType dtype;
  const View view;
  const int64_t numel;  // number of kept values
  // While this reference exists, no other storage can get the same address.
  const c10::weak_intrusive_ptr<c10::StorageImpl> origin;
  std::optional<Parked> parked;  // from put_away() to close()
};

Activations::Activations(Tier hold, const device::Device& device)
    : hold_(hold), shelf_(std::make_shared<Shelf>(hold, device)) {}

void Activations::open_disk(const mem::DiskOptions& options) { shelf_->open_disk(options); }

void Activations::begin_forward() {
  seen_.clear();
  pending_.clear();
}

std::function<at::Tensor()> Activations::save(int unit, const at::Tensor& input) {
  // A leaf is a tensor of the user or a parameter.
  const bool is_leaf = input.requires_grad() && input.is_leaf();
  if (!is_plain(input)) return [input] { return input; };
  if (is_leaf) {
    return [input, version = input._version()] {
      check_unchanged(input, version, "an input of a recomputed unit");
      return input;
    };
  }
  const at::NoGradGuard no_grad;
  View view = view_of(input);
  if (static_cast<int64_t>(input.nbytes()) < kSmallBytes) {
    const at::Tensor kept = content_of(input, view).clone();
    return [kept, view = std::move(view)] { return rebuild(kept, view); };
  }
  Call& seen = seen_[input.storage().unsafeGetStorageImpl()];
  for (const std::weak_ptr<SavedTensor>& known : seen) {
    if (const std::shared_ptr<SavedTensor> entry = known.lock();
        entry && entry->holds(input, view)) {
      return [entry, view = std::move(view), after = entry->shift(input)] {
        return entry->fetch(view, after);
      };
    }
  }
  auto entry = std::make_shared<SavedTensor>(input, view);
  seen.push_back(entry);
  pending_[unit].push_back(entry);
  return [entry = std::move(entry), view = std::move(view)] { return entry->fetch(view, 0); };
}

void Activations::put_away(int unit, const std::string& name) {
  const auto pending = pending_.find(unit);
  if (pending == pending_.end()) return;
  const Call saved = std::move(pending->second);
  pending_.erase(pending);
  settle();
  const auto gone = [](const std::weak_ptr<SavedTensor>& entry) { return entry.expired(); };
  std::vector<Call>& calls = calls_[unit];
  std::erase_if(calls,
                [&](const Call& call) { return std::all_of(call.begin(), call.end(), gone); });
  calls.push_back(saved);
  for (const std::weak_ptr<SavedTensor>& one : saved) {
    const std::shared_ptr<SavedTensor> entry = one.lock();
    if (!entry) continue;  // autograd's graph did not keep the tensor
    check_unchanged(entry->source, entry->version, concat("an input of ", name));
    entry->put_away(shelf_);
    if (hold_ == Tier::kDisk) writing_.push_back(entry);
  }
}

void Activations::bring(int unit) {
  const auto found = calls_.find(unit);
  if (found == calls_.end()) return;
  for (auto call = found->second.rbegin(); call != found->second.rend(); ++call) {
    bool alive = false;
    for (const std::weak_ptr<SavedTensor>& one : *call) {
      const std::shared_ptr<SavedTensor> entry = one.lock();
      if (!entry || !entry->parked) continue;
      entry->parked->bring();
      alive = true;
    }
    if (alive) return;
  }
}

// Frees the memory of entries whose write has ended, and starts the writes of entries that are in
// host memory.
void Activations::settle() {
  for (const std::weak_ptr<SavedTensor>& one : std::exchange(writing_, {})) {
    const std::shared_ptr<SavedTensor> entry = one.lock();
    if (entry && entry->parked && !entry->parked->settle()) writing_.push_back(entry);
  }
}

void Activations::close() {
  const auto close_all = [](const Call& call) {
    for (const std::weak_ptr<SavedTensor>& one : call) {
      const std::shared_ptr<SavedTensor> entry = one.lock();
      if (entry) entry->let_go();
    }
  };
  for (const auto& [unit, call] : std::exchange(pending_, {})) close_all(call);
  for (const auto& [unit, calls] : std::exchange(calls_, {})) {
    std::for_each(calls.begin(), calls.end(), close_all);
  }
  writing_.clear();
  seen_.clear();
  shelf_->close();
}

}  // namespace penstock::activations
