#include "src/activations/layer_caches.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/device/kernels.h"
#include "src/device/wire_codec.h"

namespace penstock::activations {

namespace {

// A chunk of one side has about this size, so that disks read it fast and the tokens that stay on
// the device take little memory.
constexpr int64_t kChunkBytes = 1 << 20;
constexpr int64_t kMostChunkTokens = 256;

constexpr int64_t kTokens = 2;  // the dim of tokens

// `token_bytes`: of one token of all sequences.
int64_t tokens_of_chunk(int64_t token_bytes) {
  const int64_t bytes = std::max<int64_t>(1, token_bytes);
  int64_t tokens = 1;
  while (2 * tokens <= kMostChunkTokens && 2 * tokens * bytes <= kChunkBytes) tokens *= 2;
  return tokens;
}

std::string shape_text(const at::Tensor& tensor) {
  std::vector<std::string> sizes;
  for (const int64_t size : tensor.sizes()) sizes.push_back(std::to_string(size));
  return concat("[", join(sizes, ", "), "]");
}

[[noreturn]] void fail_closed() {
  throw RuntimeFault("[activations::LayerCache] close() of the engine has freed the cached tokens");
}

}  // namespace

LayerCache::LayerCache(std::shared_ptr<Shelf> shelf, Dtype rest, int64_t window)
    : shelf_(std::move(shelf)), rest_(rest), window_(window) {}

LayerCache::~LayerCache() = default;

void LayerCache::check(const Pair& made) const {
  const auto refuse = [&](const std::string& why) {
    throw ConfigError(concat("[activations::LayerCache] keys of shape ", shape_text(made.keys),
                             " and values of shape ", shape_text(made.values), " ", why));
  };
  if (closed_) fail_closed();
  if (broken_) {
    throw RuntimeFault(
        "[activations::LayerCache] an error cut a change of the cached tokens short. Begin with a "
        "new cache");
  }
  if (made.keys.dim() != 4 || made.values.dim() != 4) {
    refuse("cannot be cached: both need the dims batch, heads, tokens, size");
  }
  if (made.keys.size(0) != made.values.size(0) || made.keys.size(2) != made.values.size(2)) {
    refuse("differ in their number of sequences or tokens");
  }
  if (made.keys.scalar_type() != made.values.scalar_type()) refuse("have different dtypes");
  if (at::GradMode::is_enabled() && (made.keys.requires_grad() || made.values.requires_grad())) {
    refuse("need a backward, but offload.cache is for forwards under torch.no_grad()");
  }
  if (made.keys.device() != shelf_->computes().where()) {
    refuse(concat("are on ", made.keys.device().str(), ", but the engine computes on ",
                  shelf_->computes().where().str()));
  }
  if (tokens_ == 0) return;
  const auto fits = [&](const at::Tensor& one, const Side& side) {
    return one.size(0) == side.shape[0] && one.size(1) == side.shape[1] &&
           one.size(3) == side.shape[3];
  };
  if (!fits(made.keys, keys_) || !fits(made.values, values_)) {
    refuse(concat("do not fit the ", tokens_, " tokens of ", batch_, " sequences in the cache"));
  }
  if (made.keys.scalar_type() != c10::typeMetaToScalarType(options_.dtype())) {
    refuse("have another dtype than the tokens in the cache");
  }
}

LayerCache::Pair LayerCache::add(const Pair& made) {
  check(made);
  const at::NoGradGuard no_grad;
  put_away();  // of an earlier call in the same forward
  if (tokens_ == 0) {
    batch_ = made.keys.size(0);
    chunk_tokens_ = tokens_of_chunk(made.keys.size(0) * made.keys.size(1) * made.keys.size(3) *
                                    static_cast<int64_t>(made.keys.element_size()));
    options_ = made.keys.options().requires_grad(false);
    for (const auto& [side, one] : {std::pair(&keys_, &made.keys), {&values_, &made.values}}) {
      side->shape = {one->size(0), one->size(1), chunk_tokens_, one->size(3)};
    }
  }
  // An error leaves both sides as they are.
  const at::Tensor keys = assemble(keys_, made.keys), values = assemble(values_, made.values);
  Pair all{seen(keys, keys_.first * chunk_tokens_), seen(values, values_.first * chunk_tokens_)};
  tokens_ += made.keys.size(kTokens);
  for (const auto& [side, whole] : {std::pair(&keys_, &keys), {&values_, &values}}) {
    side->whole = *whole;
    side->whole_first = side->first * chunk_tokens_;
    side->tail.reset();
  }
  return all;
}

// Returns the kept tokens and those that were made.
at::Tensor LayerCache::assemble(Side& side, const at::Tensor& made) {
  const int64_t first = side.first * chunk_tokens_, all = tokens_ + made.size(kTokens);
  std::vector<int64_t> sizes = side.shape;
  sizes[kTokens] = all - first;
  at::Tensor whole = shelf_->empty(sizes, made.scalar_type());
  const auto put = [&](int64_t at, const at::Tensor& part) {
    whole.narrow(kTokens, at - first, part.size(kTokens)).copy_(part);
  };
  for (const std::unique_ptr<Parked>& one : side.chunks) one->bring();
  for (size_t at = 0; at < side.chunks.size(); ++at) {
    put(first + static_cast<int64_t>(at) * chunk_tokens_, chunk(side, at));
    side.chunks[at]->release();
  }
  if (side.tail.defined()) put(tokens_ - side.tail.size(kTokens), side.tail);
  put(tokens_, made);
  return whole;
}

// Returns the tokens in the window of those that begin with token `first`.
at::Tensor LayerCache::seen(const at::Tensor& whole, int64_t first) const {
  const int64_t begin = std::max(first, first_needed());
  return whole.narrow(kTokens, begin - first, whole.size(kTokens) - (begin - first));
}

// Returns the first of the earlier tokens to which the next token attends.
int64_t LayerCache::first_needed() const {
  return window_ > 0 ? std::max<int64_t>(0, tokens_ - (window_ - 1)) : 0;
}

void LayerCache::drop_passed(Side& side) const {
  const int64_t needed = std::min(first_needed() / chunk_tokens_,
                                  side.first + static_cast<int64_t>(side.chunks.size()));
  if (needed <= side.first) return;
  side.chunks.erase(side.chunks.begin(), side.chunks.begin() + (needed - side.first));
  side.first = needed;
}

void LayerCache::put_away() {
  const at::NoGradGuard no_grad;
  for (Side* const side : {&keys_, &values_}) put_away(*side);
}

void LayerCache::put_away(Side& side) {
  if (!side.whole.defined()) return;
  const int64_t start = side.whole_first, complete = tokens_ / chunk_tokens_;
  int64_t at = side.first + static_cast<int64_t>(side.chunks.size());
  if (!keeps_past_) {
    drop_passed(side);
    // Chunks that the window has passed already are not moved.
    const int64_t needed = std::min(first_needed() / chunk_tokens_, complete);
    if (side.chunks.empty()) side.first = at = std::max(at, needed);
  }
  for (; at < complete; ++at) {
    side.chunks.push_back(
        park(side.whole.narrow(kTokens, at * chunk_tokens_ - start, chunk_tokens_).contiguous()));
  }
  const int64_t rest = complete * chunk_tokens_;
  if (rest < tokens_) side.tail = side.whole.narrow(kTokens, rest - start, tokens_ - rest).clone();
  side.whole.reset();
}

bool LayerCache::settle() {
  bool settled = true;
  for (Side* const side : {&keys_, &values_}) {
    for (const std::unique_ptr<Parked>& one : side->chunks) settled &= one->settle();
  }
  return settled;
}

std::unique_ptr<Parked> LayerCache::park(const at::Tensor& chunk) const {
  if (!is_quantized(rest_)) return std::make_unique<Parked>(shelf_, chunk.view(-1));
  const device::Device* const where = shelf_->computes().is_host() ? nullptr : &shelf_->computes();
  const std::optional<Dtype> dtype = device::find_dtype(chunk.scalar_type());
  if (!dtype) {
    throw ConfigError(concat("[activations::LayerCache] tokens of the dtype ",
                             c10::toString(chunk.scalar_type()), " cannot be quantized"));
  }
  const at::Tensor codes =
      at::empty({buffer_bytes(rest_, chunk.numel())}, chunk.options().dtype(at::kByte));
  device::recode(device::address_of(codes, where), rest_, device::address_of(chunk, where), *dtype,
                 chunk.numel());
  return std::make_unique<Parked>(shelf_, codes);
}

// Waits for the values of a chunk.
at::Tensor LayerCache::chunk(Side& side, size_t at) {
  const at::Tensor values = side.chunks[at]->values();
  if (!is_quantized(rest_)) return values.view(side.shape);
  const device::Device* const where = shelf_->computes().is_host() ? nullptr : &shelf_->computes();
  const at::Tensor decoded = at::empty(side.shape, options_);
  device::recode(device::address_of(decoded, where), *device::find_dtype(decoded.scalar_type()),
                 device::address_of(values, where), rest_, decoded.numel());
  return decoded;
}

void LayerCache::bring() {
  for (Side* const side : {&keys_, &values_}) {
    for (const std::unique_ptr<Parked>& one : side->chunks) one->bring();
  }
}

void LayerCache::release() {
  for (Side* const side : {&keys_, &values_}) {
    for (const std::unique_ptr<Parked>& one : side->chunks) one->release();
  }
}

// Changes all chunks. An error leaves some of them unchanged, so the tokens are of no use.
template <class Change>
void LayerCache::change(const Change& edit) {
  const at::NoGradGuard no_grad;
  put_away();
  try {
    for (Side* const side : {&keys_, &values_}) edit(*side);
    while (!settle()) {  // waits, because all chunks together may not fit into memory
    }
  } catch (...) {
    clear();
    broken_ = true;
    throw;
  }
}

void LayerCache::select(const at::Tensor& sequences) {
  put_away();
  if (tokens_ == 0) return;
  const at::Tensor chosen = sequences.to(options_.device());
  // With more sequences, chunks have fewer tokens.
  const int64_t token_bytes = keys_.shape[1] * keys_.shape[3] * chosen.numel() *
                              static_cast<int64_t>(options_.dtype().itemsize());
  const int64_t chunk_tokens = std::min(chunk_tokens_, tokens_of_chunk(token_bytes));
  change([&](Side& side) { select_in(side, chosen, chunk_tokens); });
  chunk_tokens_ = chunk_tokens;
  batch_ = chosen.numel();
}

void LayerCache::select_in(Side& side, const at::Tensor& chosen, int64_t chunk_tokens) {
  std::vector<std::unique_ptr<Parked>> chunks;
  const auto split = [&](const at::Tensor& tokens) {
    int64_t at = 0;
    for (; at + chunk_tokens <= tokens.size(kTokens); at += chunk_tokens) {
      chunks.push_back(park(tokens.narrow(kTokens, at, chunk_tokens).contiguous()));
      chunks.back()->settle();
    }
    return at < tokens.size(kTokens) ? tokens.narrow(kTokens, at, tokens.size(kTokens) - at).clone()
                                     : at::Tensor();
  };
  for (size_t at = 0; at < side.chunks.size(); ++at) {
    split(chunk(side, at).index_select(0, chosen));
    side.chunks[at].reset();
  }
  if (side.tail.defined()) side.tail = split(side.tail.index_select(0, chosen));
  side.first *= chunk_tokens_ / chunk_tokens;
  side.chunks = std::move(chunks);
  side.shape[0] = chosen.numel();
  side.shape[kTokens] = chunk_tokens;
}

void LayerCache::copy(LayerCache& other) {
  const at::NoGradGuard no_grad;
  other.put_away();
  clear();
  tokens_ = other.tokens_;
  batch_ = other.batch_;
  chunk_tokens_ = other.chunk_tokens_;
  options_ = other.options_;
  keeps_past_ = other.keeps_past_;
  broken_ = other.broken_;
  change([&](Side& side) {
    Side& from = &side == &keys_ ? other.keys_ : other.values_;
    side.first = from.first;
    side.shape = from.shape;
    if (from.tail.defined()) side.tail = from.tail.clone();
    for (size_t at = 0; at < from.chunks.size(); ++at) {
      side.chunks.push_back(park(other.chunk(from, at)));
      from.chunks[at]->release();
      side.chunks.back()->settle();
    }
  });
}

void LayerCache::remove_last(int64_t tokens) {
  const at::NoGradGuard no_grad;
  put_away();
  if (tokens >= tokens_) return clear();
  const int64_t before = tokens_;
  tokens_ -= std::max<int64_t>(0, tokens);
  if (first_needed() < keys_.first * chunk_tokens_) {
    tokens_ = before;
    throw RuntimeFault(concat("[activations::LayerCache] ", tokens, " of ", before,
                              " tokens cannot be removed, because the window of ", window_,
                              " tokens has passed some that would be needed again"));
  }
  const int64_t rest = tokens_ % chunk_tokens_;
  for (Side* const side : {&keys_, &values_}) {
    const auto complete = static_cast<size_t>(tokens_ / chunk_tokens_ - side->first);
    const at::Tensor last =
        complete < side->chunks.size() && rest > 0 ? chunk(*side, complete) : side->tail;
    side->tail = rest > 0 ? last.narrow(kTokens, 0, rest).clone() : at::Tensor();
    if (complete < side->chunks.size()) side->chunks.resize(complete);
    drop_passed(*side);
  }
}

void LayerCache::clear() {
  for (Side* const side : {&keys_, &values_}) *side = {};
  tokens_ = batch_ = 0;
  broken_ = false;
}

void LayerCache::close() {
  clear();
  closed_ = true;
}

LayerCaches::LayerCaches(const Placement& rest, const device::Device& computes)
    : rest_(rest.dtype), shelf_(std::make_shared<Shelf>(rest.tier, computes)) {}

void LayerCaches::open_disk(const mem::DiskOptions& options) { shelf_->open_disk(options); }

std::shared_ptr<LayerCache> LayerCaches::make(int64_t window) {
  if (closed_) fail_closed();
  std::erase_if(made_, [](const std::weak_ptr<LayerCache>& one) { return one.expired(); });
  auto cache = std::make_shared<LayerCache>(shelf_, rest_, window);
  made_.push_back(cache);
  return cache;
}

LayerCache::Pair LayerCaches::add(int unit, const std::shared_ptr<LayerCache>& cache,
                                  const LayerCache::Pair& made) {
  adding_[unit].push_back(cache);
  return cache->add(made);
}

void LayerCaches::bring(int unit) {
  for (const std::weak_ptr<LayerCache>& one : used_[unit]) {
    if (const std::shared_ptr<LayerCache> cache = one.lock()) cache->bring();
  }
}

void LayerCaches::put_away(int unit) {
  const auto adding = adding_.find(unit);
  Caches used;
  if (adding != adding_.end()) used = std::exchange(adding->second, {});
  for (const std::weak_ptr<LayerCache>& one : used_[unit]) {
    if (const std::shared_ptr<LayerCache> cache = one.lock()) cache->release();
  }
  // Only the chunks of the last unit are written at one time.
  std::erase_if(writing_, [](const std::weak_ptr<LayerCache>& one) {
    const std::shared_ptr<LayerCache> cache = one.lock();
    return !cache || cache->settle();
  });
  for (const std::weak_ptr<LayerCache>& one : used) {
    const std::shared_ptr<LayerCache> cache = one.lock();
    if (!cache) continue;
    cache->put_away();
    writing_.push_back(one);
  }
  used_[unit] = std::move(used);
}

void LayerCaches::put_away_rest(int unit) {
  const auto adding = adding_.find(unit);
  if (adding != adding_.end() && !adding->second.empty()) put_away(unit);
}

void LayerCaches::close() {
  closed_ = true;
  for (const std::weak_ptr<LayerCache>& one : std::exchange(made_, {})) {
    if (const std::shared_ptr<LayerCache> cache = one.lock()) cache->close();
  }
  used_.clear();
  adding_.clear();
  writing_.clear();
  shelf_->close();
}

}  // namespace penstock::activations
