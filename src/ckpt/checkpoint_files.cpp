// Checkpoint files that are written and read without an engine (penstock/checkpoint_files.h).
#include "penstock/checkpoint_files.h"

#include <ATen/ops/empty.h>

#include <cstring>
#include <filesystem>
#include <optional>
#include <utility>

#include "src/base/text.h"
#include "src/ckpt/damaged.h"
#include "src/ckpt/folder.h"
#include "src/ckpt/inventory.h"
#include "src/ckpt/load.h"
#include "src/ckpt/shard.h"

namespace penstock {

namespace {

using ckpt::Json;

constexpr int64_t kHalfBytes = 4LL << 20;
constexpr const char* kShard = "rank-00000.safetensors";

Json parse(const std::string& text, const char* what) {
  try {
    return ckpt::parse_json(text, what);
  } catch (const ckpt::Damaged& error) {
    throw ConfigError(error.what());
  }
}

}  // namespace

// ---- writing

struct CheckpointWriter::Impl {
  std::vector<StoredTensor> wanted;
  std::vector<bool> written;
  ckpt::Manifest manifest;
  std::vector<ckpt::Region> regions;  // by tensor
  std::optional<ckpt::Draft> draft;
  ckpt::Block memory;  // two halves: one is filled while the system writes the other
  std::optional<ckpt::ShardWriter> shard;
  int half = 0;

  ckpt::ShardLayout describe(const StoredState& state);
  void put(int64_t offset, const char* data, int64_t bytes);
};

ckpt::ShardLayout CheckpointWriter::Impl::describe(const StoredState& state) {
  manifest.world = 1;
  manifest.about = parse(state.about, "about");
  manifest.state = parse(state.state, "state");
  manifest.front = parse(state.front, "front");
  manifest.ranks = {parse(state.of_rank, "of_rank")};
  for (size_t i = 0; i < wanted.size(); ++i) {
    const StoredTensor& one = wanted[i];
    try {
      manifest.tensors.push_back(
          {one.role, one.name, one.rank, one.shape, ckpt::file_dtype(one.dtype), {}});
    } catch (const ConfigError& error) {
      throw ConfigError(concat("\"", one.name, "\": ", error.what()));
    }
    const int64_t numel = ckpt::num_elements(one.shape);
    if (numel < 0)
      throw ConfigError(concat("[ckpt::files] \"", one.name, "\" has an invalid shape"));
    ckpt::Region region;
    if (one.same_as < 0) {
      region.bytes = numel * static_cast<int64_t>(c10::elementSize(one.dtype));
      region.runs.push_back({static_cast<int>(i), 0, numel, 0});
    }
    regions.push_back(std::move(region));
  }
  // If a tensor shares its values with an earlier tensor, its region is empty. Its slices are set
  // after the layout is made.
  ckpt::ShardLayout layout = ckpt::lay_out(regions, manifest.tensors);
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (wanted[i].same_as < 0) continue;
    const auto other = static_cast<size_t>(wanted[i].same_as);
    if (other >= wanted.size() || wanted[other].same_as >= 0 ||
        wanted[other].shape != wanted[i].shape || wanted[other].dtype != wanted[i].dtype) {
      throw ConfigError(concat("[ckpt::files] \"", wanted[i].name, "\" has same_as ", other,
                               ". Tensor ", other,
                               " must exist, must have the same shape and "
                               "dtype, and must have no same_as of its own"));
    }
    manifest.tensors[i].slices = manifest.tensors[other].slices;
    written[i] = true;
  }
  layout.file.name = kShard;
  manifest.files = {layout.file};
  return layout;
}

// Copies the data through the two halves, because writes need whole blocks at block-aligned
// addresses.
void CheckpointWriter::Impl::put(int64_t offset, const char* data, int64_t bytes) {
  for (int64_t done = 0; done < bytes; done += kHalfBytes) {
    const int64_t part = std::min(kHalfBytes, bytes - done);
    const int64_t whole = mem::block_padded(part);
    char* room = memory.get() + half * kHalfBytes;
    shard->flush(half);
    std::memcpy(room, data + done, static_cast<size_t>(part));
    std::memset(room + part, 0, static_cast<size_t>(whole - part));
    shard->write(offset + done, room, whole, half);
    half = 1 - half;
  }
}

CheckpointWriter::CheckpointWriter(const std::string& root, const std::string& tag,
                                   std::vector<StoredTensor> tensors, const StoredState& state)
    : files_(std::make_unique<Impl>()) {
  if (!ckpt::is_tag(tag)) {
    throw ConfigError(concat("[ckpt::files] the tag \"", tag, "\" is not a valid folder name"));
  }
  files_->wanted = std::move(tensors);
  files_->written.assign(files_->wanted.size(), false);
  const ckpt::ShardLayout layout = files_->describe(state);
  try {
    // A later reader will make the same checks.
    ckpt::Manifest::parse(files_->manifest.text());
  } catch (const ckpt::Damaged& error) {
    throw ConfigError(error.what());
  }
  files_->memory = ckpt::aligned_block(2 * kHalfBytes);
  files_->draft.emplace(root, tag);
  files_->shard.emplace(files_->draft->path() + "/" + kShard, layout);
}

CheckpointWriter::~CheckpointWriter() = default;

void CheckpointWriter::write(int index, const at::Tensor& values) {
  if (index < 0 || index >= static_cast<int>(files_->wanted.size()) || files_->written[index]) {
    throw ConfigError(concat("[ckpt::files] cannot write tensor ", index,
                             ": it does not exist or was already written"));
  }
  const StoredTensor& wanted = files_->wanted[index];
  if (values.sizes() != at::IntArrayRef(wanted.shape) || values.scalar_type() != wanted.dtype ||
      !values.device().is_cpu()) {
    throw ConfigError(concat("[ckpt::files] the values of \"", wanted.name,
                             "\" must have the declared shape and dtype and be on the CPU"));
  }
  const at::Tensor whole = values.detach().contiguous();
  files_->put(files_->regions[index].offset, static_cast<const char*>(whole.const_data_ptr()),
              files_->regions[index].bytes);
  files_->written[index] = true;
}

std::string CheckpointWriter::commit() {
  for (size_t i = 0; i < files_->written.size(); ++i) {
    if (files_->written[i]) continue;
    throw ConfigError(concat("[ckpt::files] \"", files_->wanted[i].name, "\" was not written"));
  }
  files_->manifest.files[0].checksum = files_->shard->finish();
  files_->shard.reset();
  ckpt::write_text(files_->draft->path() + "/" + ckpt::kManifest, files_->manifest.text());
  return files_->draft->commit(0);
}

// ---- reading

struct CheckpointReader::Impl {
  ckpt::Manifest manifest;
  std::unique_ptr<ckpt::TensorReader> reader;
};

CheckpointReader::CheckpointReader(const std::string& path, const std::string& tag)
    : path_(path), files_(std::make_unique<Impl>()) {
  if (!tag.empty()) {
    path_ += "/" + tag;
  } else if (!ckpt::exists(path + "/" + ckpt::kManifest)) {
    const std::vector<std::string> tags = ckpt::tags(path);
    if (tags.empty()) {
      throw RuntimeFault(concat("[ckpt::files] no checkpoint in \"", path,
                                "\": there is no file \"", path, "/", ckpt::kManifest,
                                "\", and no folder in it has one"));
    }
    path_ += "/" + tags.front();
  }
  ckpt::Manifest& manifest = files_->manifest;
  manifest = ckpt::Manifest::read(path_ + "/" + ckpt::kManifest);
  files_->reader = std::make_unique<ckpt::TensorReader>(path_, manifest);
  for (const ckpt::Tensor& one : manifest.tensors) {
    tensors_.push_back({one.role, one.name, one.rank, one.shape, ckpt::scalar_type(one.dtype), -1});
  }
  state_ = {manifest.about.dump(), manifest.state.dump(), manifest.front.dump(),
            manifest.ranks.front().dump()};
}

CheckpointReader::~CheckpointReader() = default;

at::Tensor CheckpointReader::read(int index) {
  if (index < 0 || index >= static_cast<int>(tensors_.size())) {
    throw ConfigError(concat("[ckpt::files] no tensor has index ", index));
  }
  const StoredTensor& one = tensors_[index];
  at::Tensor values = at::empty(one.shape, at::TensorOptions().dtype(one.dtype));
  files_->reader->read(files_->manifest.tensors[index], 0, values.numel(),
                       static_cast<char*>(values.data_ptr()));
  return values;
}

void CheckpointReader::verify() { files_->reader->verify(); }

std::vector<SafetensorsEntry> read_safetensors_head(const std::string& path) {
  const std::string first = ckpt::read_head(path, 8);
  const auto bytes = static_cast<int64_t>(std::filesystem::file_size(path));
  try {
    const int64_t size = ckpt::head_bytes(first, bytes);
    const std::string head = ckpt::read_head(path, size);
    std::vector<SafetensorsEntry> entries;
    for (ckpt::TensorHead& one : ckpt::parse_head(head, bytes)) {
      entries.push_back(
          {std::move(one.name), one.shape, ckpt::scalar_type(one.dtype), size + one.begin});
    }
    return entries;
  } catch (const ckpt::Damaged& damage) {
    throw RuntimeFault(concat(damage.what(), ", in \"", path, "\""));
  }
}

}  // namespace penstock
