#include "src/ckpt/load.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

#include "src/base/text.h"
#include "src/ckpt/damaged.h"
#include "src/device/host_kernels.h"
#include "src/device/kernels.h"
#include "src/device/wire_codec.h"

namespace penstock::ckpt {

namespace {

constexpr int64_t kBlockElements = 1LL << 18;
constexpr size_t kNamed = 20;  // largest number of differences that an error lists

constexpr const char* kParam = "param";
constexpr const char* kBuffer = "buffer";
constexpr const char* kUsers = "optim.";  // prefix of roles of the user's own optimizer
// Role of a parameter or a buffer: a state dict does not say which of the two a tensor is.
constexpr const char* kWeight = "weight";

Dtype dtype_named(const std::string& name) {
  return name == "F32" ? Dtype::kFp32 : name == "BF16" ? Dtype::kBf16 : Dtype::kFp16;
}

bool is_float(const std::string& name) { return name == "F32" || name == "BF16" || name == "F16"; }

std::string key_of(const Extra& extra) {
  return Tensor{extra.role, extra.global.name, extra.rank, {}, {}, {}}.key();
}

std::string text(const std::vector<int64_t>& shape) {
  std::vector<std::string> sizes;
  for (const int64_t size : shape) sizes.push_back(concat(size));
  return concat("[", join(sizes, ", "), "]");
}

std::string list(const char* what, const std::vector<std::string>& names) {
  if (names.empty()) return "";
  std::vector<std::string> first(names.begin(), names.begin() + std::min(names.size(), kNamed));
  const std::string more =
      names.size() > kNamed ? concat(" and ", names.size() - kNamed, " more") : "";
  return concat("\n  ", what, ": ", join(first, ", "), more);
}

// Returns the checkpoint's entry for a tensor of the model, or null.
const Tensor* find(const Manifest& manifest, const TensorLoadOptions& options,
                   const std::string& role, const std::string& name, int rank = -1) {
  const auto in_role = [&](const std::string& of, const std::string& named) {
    return manifest.find(Tensor{of, named, rank, {}, {}, {}}.key());
  };
  const Tensor* found = in_role(role, name);
  if (found != nullptr || rank >= 0) return found;
  if (role != kParam && role != kBuffer) {
    // The role is the same for Penstock's kernels and for the user's own optimizer.
    return in_role(role.starts_with(kUsers) ? role.substr(std::strlen(kUsers)) : kUsers + role,
                   name);
  }
  found = in_role(kWeight, name);
  const auto [first, last] = options.tied.equal_range(name);
  for (auto other = first; other != last && found == nullptr; ++other) {
    found = in_role(kWeight, other->second);
  }
  return found;
}

bool is_optimizers(const std::string& key) {
  return !key.starts_with(kParam) && !key.starts_with(kBuffer);
}

// Compares the entries of the checkpoint with the tensors of the model.
struct Comparison {
  const Manifest& manifest;
  const TensorLoadOptions& options;
  std::set<std::string> wanted{};
  std::vector<std::string> missing{}, unexpected{}, different{};
  std::set<const Tensor*> taken{};

  void look(const Tensor& tensor) {
    const std::string key = tensor.key();
    if (!wanted.insert(key).second) return;
    const Tensor* found = find(manifest, options, tensor.role, tensor.name, tensor.rank);
    if (found == nullptr) return missing.push_back(key);
    taken.insert(found);
    if (found->shape != tensor.shape) {
      return different.push_back(concat(key, " has shape ", text(found->shape),
                                        " in the checkpoint and ", text(tensor.shape), " here"));
    }
    // Floating-point values are converted on loading.
    if (found->dtype == tensor.dtype || (is_float(found->dtype) && is_float(tensor.dtype))) return;
    different.push_back(
        concat(key, " has dtype ", found->dtype, " in the checkpoint and ", tensor.dtype, " here"));
  }
  // A state dict has a tied weight under each of its names.
  bool has(const Tensor& tensor) const {
    const auto is_name = [&](const auto& one) { return one.second == tensor.name; };
    return taken.count(&tensor) > 0 ||
           (tensor.role == kWeight &&
            std::any_of(options.tied.begin(), options.tied.end(), is_name));
  }
  void finish() {
    if (missing.empty() && unexpected.empty() && different.empty()) return;
    const bool weights_alone = !missing.empty() && unexpected.empty() && different.empty() &&
                               std::all_of(missing.begin(), missing.end(), is_optimizers);
    throw ConfigError(concat("[ckpt::load] the checkpoint belongs to another model or optimizer",
                             weights_alone ? " (weights_only loads the weights alone)" : "", ":",
                             list("missing in the checkpoint", missing),
                             list("unexpected", unexpected), list("different", different)));
  }
};

}  // namespace

bool has_parameter(const Manifest& manifest, const TensorLoadOptions& options,
                   const std::string& name) {
  return find(manifest, options, kParam, name) != nullptr;
}

// ---- reading

TensorReader::TensorReader(const std::string& folder, const Manifest& manifest)
    : manifest_(manifest) {
  for (const File& file : manifest.files) {
    files_.push_back(std::make_unique<ShardReader>(folder, file));
  }
}

void TensorReader::read(const Tensor& tensor, int64_t begin, int64_t numel, char* to) {
  // Slices are sorted and have no gaps (Manifest::parse), so the first slice to read is found by
  // its end.
  const int64_t size = value_bytes(tensor.dtype), end = begin + numel;
  auto slice = std::upper_bound(tensor.slices.begin(), tensor.slices.end(), begin,
                                [](int64_t at, const Slice& one) { return at < one.end; });
  for (; slice != tensor.slices.end() && begin < end; ++slice) {
    const int64_t part = std::min(end, slice->end) - begin;
    files_[slice->file]->read(slice->offset + (begin - slice->begin) * size, part * size, to);
    begin += part;
    to += part * size;
  }
}

void TensorReader::verify() {
  for (size_t i = 0; i < files_.size(); ++i) files_[i]->verify(manifest_, static_cast<int>(i));
}

int64_t TensorReader::bytes_read() const {
  int64_t bytes = 0;
  for (const auto& file : files_) bytes += file->bytes_read();
  return bytes;
}

// ---- names

void check(const Manifest& manifest, const Target& target, const std::vector<std::string>& moments,
           const TensorLoadOptions& options) {
  Comparison comparison{manifest, options};
  std::set<std::string> roles = {kParam, kBuffer, kWeight};
  for (const Holding& holding : target.holdings) {
    if (holding.role != kParam && !options.optimizer) continue;
    roles.insert(holding.role);
    // Checks the whole flat, because the parts of other ranks must also be in the checkpoint.
    for (const StatePiece& piece : pieces(holding, 0, holding.flat->numel, target.global_of)) {
      comparison.look({holding.role,
                       piece.global.name,
                       -1,
                       piece.global.shape,
                       file_dtype(holding.buffer->dtype),
                       {}});
    }
  }
  for (const Extra& extra : target.extras) {
    if (!extra.tensor.is_non_overlapping_and_dense()) {
      comparison.different.push_back(
          concat(key_of(extra), " is a view with gaps or overlapping elements here. Clone it"));
    }
    comparison.look({extra.role,
                     extra.global.name,
                     extra.rank,
                     extra.global.shape,
                     file_dtype(extra.tensor.scalar_type()),
                     {}});
  }
  if (options.optimizer) roles.insert(moments.begin(), moments.end());
  for (const Tensor& tensor : manifest.tensors) {
    if (tensor.rank >= 0 || comparison.has(tensor)) continue;
    if (target.elsewhere.contains(tensor.name)) continue;
    // A rank expects a user's optimizer to have state only for parameters that the rank has a piece
    // of.
    const bool piece = tensor.role.starts_with(kUsers) && options.optimizer &&
                       comparison.wanted.count(concat(kParam, "/", tensor.name)) == 0;
    if (piece || roles.count(tensor.role) > 0) comparison.unexpected.push_back(tensor.key());
  }
  comparison.finish();
}

void check_tied(TensorReader& reader, const Manifest& manifest, const TensorLoadOptions& options) {
  for (const auto& [own, other] : options.tied) {
    const Tensor* one = manifest.find(Tensor{kWeight, own, -1, {}, {}, {}}.key());
    const Tensor* two = manifest.find(Tensor{kWeight, other, -1, {}, {}, {}}.key());
    if (one == nullptr || two == nullptr) continue;
    bool same = one->shape == two->shape && one->dtype == two->dtype;
    const int64_t size = value_bytes(one->dtype);
    std::vector<char> ones(static_cast<size_t>(kBlockElements * size)), twos(ones.size());
    for (int64_t done = 0; done < one->numel() && same; done += kBlockElements) {
      const int64_t part = std::min(kBlockElements, one->numel() - done);
      reader.read(*one, done, part, ones.data());
      reader.read(*two, done, part, twos.data());
      same = std::memcmp(ones.data(), twos.data(), static_cast<size_t>(part * size)) == 0;
    }
    if (same) continue;
    throw ConfigError(concat("[ckpt::load] \"", other, "\" differs from \"", own,
                             "\" in the checkpoint, but the model ties the two"));
  }
}

// ---- values

namespace {

struct Filling {
  TensorReader& reader;
  const Manifest& manifest;
  const Target& target;
  const TensorLoadOptions& options;
  std::string error{};
  std::vector<char> block{};

  // Keeps the first error. Nothing is read after an error.
  template <class Work>
  void attempt(const Work& work) {
    if (!error.empty()) return;
    try {
      work();
    } catch (const Damaged& damage) {
      error = damage.what();
    }
  }

  void read(const Tensor& tensor, int64_t begin, int64_t numel, char* to, Dtype dtype) {
    if (tensor.dtype == file_dtype(dtype)) return reader.read(tensor, begin, numel, to);
    const Dtype there = dtype_named(tensor.dtype);
    for (int64_t done = 0; done < numel; done += kBlockElements) {
      const int64_t part = std::min(kBlockElements, numel - done);
      block.resize(static_cast<size_t>(part * dtype_bytes(there)));
      reader.read(tensor, begin + done, part, block.data());
      device::take(to + done * dtype_bytes(dtype), dtype, block.data(), there, part, false);
    }
  }

  // Reads the holding's elements; the gaps between parameters become zeros.
  void read(const Holding& holding, char* to, Dtype dtype) {
    const int64_t size = dtype_bytes(dtype);
    std::memset(to, 0, static_cast<size_t>(holding.numel() * size));
    attempt([&] {
      for (const StatePiece& piece :
           pieces(holding, holding.first, holding.numel(), target.global_of)) {
        const Tensor& tensor = *find(manifest, options, holding.role, piece.global.name);
        read(tensor, piece.global.begin, piece.numel, to + (piece.at - holding.first) * size,
             dtype);
      }
    });
  }

  // A value that is not finite would make its whole block NaN.
  static void refuse_nonfinite(const Holding& holding, const char* values) {
    const int64_t numel = holding.numel();
    if (device::host::first_nonfinite(values, Dtype::kFp32, numel) < 0) return;
    throw Damaged(concat("[ckpt::load] unit ", holding.unit, ", with parameter \"",
                         holding.flat->slots.front().name,
                         "\", rests quantized (quantize.dtype), but the checkpoint has values of "
                         "it that are not finite"));
  }

  void into_buffer(const Holding& holding) {
    target.executor.traffic().settle();  // so that at most one buffer is in memory
    target.executor.traffic().make_room(*holding.buffer, holding.account);
    const device::Address to = holding.buffer->data();
    if (is_quantized(holding.buffer->dtype)) {
      std::vector<char> values(static_cast<size_t>(holding.numel() * 4));
      read(holding, values.data(), Dtype::kFp32);
      attempt([&] { refuse_nonfinite(holding, values.data()); });
      const at::Tensor sent =
          device::brought(values.data(), Dtype::kFp32, holding.numel(), to.device);
      device::recode(to, holding.buffer->dtype, device::address_of(sent, to.device), Dtype::kFp32,
                     holding.numel());
    } else if (to.device == nullptr) {
      read(holding, to.host(), holding.buffer->dtype);
    } else {
      std::vector<char> values(static_cast<size_t>(holding.buffer->bytes()));
      read(holding, values.data(), holding.buffer->dtype);
      device::copy(to, values.data(), holding.buffer->bytes());
    }
    target.executor.traffic().put_back(*holding.buffer);
  }

  // Reads all masters of a flat that this rank holds, and makes the resting parameters from them.
  void masters(const std::vector<Holding>& parts) {
    const Holding& first = parts.front();
    int64_t numel = 0;
    for (const Holding& part : parts) numel += part.numel();
    mem::Lease room;
    // Used if the arena has no memory. Then this rank can still take part in the collective.
    std::vector<char> spare;
    try {
      room = target.tiers.host.take(numel * 4, mem::Account::kBuffers);
    } catch (const RuntimeFault& full) {
      attempt([&] { throw Damaged(full.what()); });
      spare.resize(static_cast<size_t>(numel * 4));
    }
    char* const values = room ? room.data().host() : spare.data();
    for (const Holding& part : parts) {
      read(part, values + (part.first - first.first) * 4, Dtype::kFp32);
    }
    target.executor.values().restore(first.unit, *first.flat, first.place, values);
  }
};

}  // namespace

std::string fill(TensorReader& reader, const Manifest& manifest, const Target& target,
                 const TensorLoadOptions& options) {
  // Holdings are listed flat by flat; all masters of a flat are loaded together.
  Filling filling{reader, manifest, target, options};
  std::vector<Holding> masters;
  const auto flush = [&] {
    if (!masters.empty()) filling.masters(masters);
    masters.clear();
  };
  for (const Holding& holding : target.holdings) {
    if (!masters.empty() && masters.front().flat != holding.flat) flush();
    if (holding.account == mem::Account::kOptim && holding.role == kParam) {
      masters.push_back(holding);
      continue;
    }
    if (holding.role != kParam && !options.optimizer) continue;
    filling.into_buffer(holding);
    if (holding.role == kParam) target.executor.values().show(*holding.flat);
  }
  flush();
  target.executor.traffic().settle();
  for (const Extra& extra : target.extras) {
    const auto on_host = extra.tensor.options().device(at::kCPU);
    const at::Tensor whole = at::empty(extra.tensor.sizes(), on_host);
    filling.attempt([&] {
      const Tensor& tensor = *find(manifest, options, extra.role, extra.global.name, extra.rank);
      auto* to = static_cast<char*>(whole.data_ptr());
      const std::string dtype = file_dtype(whole.scalar_type());
      if (tensor.dtype == dtype) {
        reader.read(tensor, extra.global.begin, whole.numel(), to);
      } else {
        filling.read(tensor, extra.global.begin, whole.numel(), to, dtype_named(dtype));
      }
      extra.tensor.detach().copy_(whole);  // copy_() increments the tensor's version counter
    });
  }
  return filling.error;
}

}  // namespace penstock::ckpt
