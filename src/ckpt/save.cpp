#include "src/ckpt/save.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <thread>
#include <utility>

#include "src/base/text.h"
#include "src/ckpt/damaged.h"
#include "src/device/kernels.h"
#include "src/mem/keep_until_exit.h"

namespace penstock::ckpt {

namespace {

using mem::block_padded;
using mem::kBlockBytes;

constexpr size_t kAhead = 2;  // pieces that are read ahead while one is written
constexpr int64_t kGroupBytes = 32LL << 20;

std::string file_name(int rank, const char* ending) {
  std::string digits = concat(rank);
  digits.insert(0, digits.size() < 5 ? 5 - digits.size() : 0, '0');
  return concat("rank-", digits, ending);
}

bool is_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % kBlockBytes == 0; }

}  // namespace

// Memory for data that cannot be written in place. It has four parts, used in rotation: some are
// filled while others are written.
class Save::Bounce {
 public:
  Bounce(mem::Arena& arena, ShardWriter& writer, int64_t bytes)
      : writer_(writer),
        part_bytes_(std::max(kBlockBytes, bytes / kParts / kBlockBytes * kBlockBytes)),
        memory_(arena.take(kParts * part_bytes_, mem::Account::kBuffers)) {}

  static constexpr int kParts = 4;
  // The first of the two batches for data that is written in place.
  static constexpr int kDirect = kParts;
  static_assert(kDirect + 2 == ShardWriter::kBatches);

  int64_t part_bytes() const { return part_bytes_; }
  // Returns room for `bytes`, rounded up to whole blocks; at most one part.
  char* take(int64_t bytes) {
    const int64_t size = block_padded(bytes);
    if (used_ + size > part_bytes_) {
      part_ = (part_ + 1) % kParts;
      used_ = 0;
      writer_.flush(part_);
    }
    char* room = memory_.data().host() + part_ * part_bytes_ + used_;
    used_ += size;
    return room;
  }
  // Writes the data at `room`, with zeros up to the end of its last block.
  void write(int64_t offset, char* room, int64_t bytes) {
    std::memset(room + bytes, 0, static_cast<size_t>(block_padded(bytes) - bytes));
    const auto part = static_cast<int>((room - memory_.data().host()) / part_bytes_);
    writer_.write(offset, room, block_padded(bytes), part);
  }
  void flush() {
    for (int part = 0; part < kParts; ++part) writer_.flush(part);
  }

 private:
  ShardWriter& writer_;
  const int64_t part_bytes_;
  mem::Lease memory_;
  int part_ = 0;
  int64_t used_ = 0;
};

Save::Save(exec::Executor& executor, mem::Tiers& tiers, int rank, std::vector<Holding> holdings,
           const GlobalOf& global_of, Contents contents)
    : executor_(executor),
      tiers_(tiers),
      rank_(rank),
      contents_(std::move(contents)),
      pending_(std::make_shared<PendingWrites>(tiers)) {
  for (const Holding& holding : holdings) add(holding, global_of, executor.mesh());
  for (const Extra& extra : contents_.extras) add(extra);
  layout_ = lay_out(regions_, tensors_);
  layout_.file.name = file_name(rank_, ".safetensors");
}

Save::~Save() {
  if (pending_ != nullptr) {  // write() did not run, because some rank could not begin the save
    pending_->abandon();
    executor_.traffic().watch(nullptr);
  }
  writer_.reset();  // must end before the memory that it writes from is freed
}

int64_t Save::bytes() const { return layout_.file.bytes; }

int Save::tensor_of(const std::string& role, const Global& global, int rank, const char* dtype) {
  Tensor tensor{role, global.name, rank, global.shape, dtype, {}};
  const auto [at, added] = by_key_.emplace(tensor.key(), static_cast<int>(tensors_.size()));
  if (added) tensors_.push_back(std::move(tensor));
  return at->second;
}

void Save::add(const Holding& holding, const GlobalOf& global_of, const Mesh& mesh) {
  if (holding.flat->quantized) {
    throw ConfigError(concat("[engine::save] parameter \"", holding.flat->slots.front().name,
                             "\" rests quantized (quantize.dtype), so the engine no longer has the "
                             "values that a checkpoint would keep. Save without frozen parameters: "
                             "save(path, frozen=False)"));
  }
  const auto [from, to] = share_of(holding, mesh, rank_);
  const int64_t size = dtype_bytes(holding.buffer->dtype);
  Region region;
  region.bytes = (to - from) * size;
  for (const StatePiece& piece : pieces(holding, holding.first + from, to - from, global_of)) {
    const int tensor = tensor_of(holding.role, piece.global, -1, file_dtype(holding.buffer->dtype));
    region.runs.push_back(
        {tensor, piece.global.begin, piece.numel, (piece.at - holding.first - from) * size});
  }
  // tensor_of() has put empty tensors into the manifest; the file needs no run for them.
  std::erase_if(region.runs, [](const Run& run) { return run.numel == 0; });
  Source& source = sources_.emplace_back();
  source.holding = holding;
  source.first = from;
  source.numel = to - from;
  source.bytes = region.bytes;
  regions_.push_back(std::move(region));
}

void Save::add(const Extra& extra) {
  Source& source = sources_.emplace_back();
  source.kept = extra.tensor.detach().cpu().contiguous();
  Region region;
  region.bytes = source.bytes = static_cast<int64_t>(source.kept.nbytes());
  const char* dtype = nullptr;
  try {
    dtype = file_dtype(extra.tensor.scalar_type());
  } catch (const ConfigError& error) {
    throw ConfigError(concat("\"", extra.global.name, "\": ", error.what()));
  }
  const int tensor = tensor_of(extra.role, extra.global, extra.rank, dtype);
  if (source.kept.numel() > 0) {
    region.runs.push_back({tensor, extra.global.begin, source.kept.numel(), 0});
  }
  regions_.push_back(std::move(region));
}

void Save::open(const std::string& folder) {
  folder_ = folder;
  writer_ = std::make_unique<ShardWriter>(folder + "/" + layout_.file.name, layout_);
  bounce_ = std::make_unique<Bounce>(tiers_.host, *writer_, contents_.room_bytes);
}

// Returns the resting parameters at the source's elements, in the memory of `where`. If parameters
// rest whole, users may have edited them since the last step; the masters lack these edits.
at::Tensor Save::edits_of(const Source& source, const device::Device* where) {
  const Holding& holding = source.holding;
  return device::brought(holding.edits->at(holding.first + source.first - holding.edits_first),
                         holding.edits->dtype, source.numel, where);
}

void Save::capture(Source& source, bool behind, bool* stays) {
  const mem::Buffer& buffer = *source.holding.buffer;
  const bool edited = source.holding.edits != nullptr && source.numel > 0;
  if (buffer.on_disk()) {
    source.offset = buffer.offset + source.first * dtype_bytes(buffer.dtype);  // block-aligned
    if (edited) source.edits = edits_of(source, nullptr).clone();
    return;
  }
  const device::Address data = buffer.at(source.first);
  source.data = data.data;
  source.device = data.device;
  if (edited) {
    const at::Tensor edits = edits_of(source, data.device);
    device::take_edits(data, buffer.dtype, device::address_of(edits, data.device),
                       source.holding.edits->dtype, source.numel);
  }
  const bool changes = source.holding.users || data.device != nullptr;
  if (!behind || !changes || source.bytes == 0) return;
  source.copy = tiers_.host.take(source.bytes, mem::Account::kBuffers);
  device::copy(source.copy.data(), data, source.bytes);
  source.data = source.copy.data().host();
  source.device = nullptr;
  *stays = true;
}

void Save::capture(bool behind) {
  // State in device memory and state that users can change are copied now. Other state is copied
  // only if training is about to change it before it is written.
  executor_.traffic().settle();
  for (Source& source : std::exchange(sources_, {})) {
    bool stays = !behind;
    if (source.holding.buffer == nullptr) {
      if (behind) source.kept = source.kept.clone();
      source.data = static_cast<const char*>(source.kept.const_data_ptr());
      stays = true;
    } else {
      capture(source, behind, &stays);
    }
    pending_->add(std::move(source), stays);
  }
  if (!tiers_.computes.is_host()) tiers_.computes.synchronize();
  if (behind) executor_.traffic().watch(pending_);
}

// Reads ahead: starts to read a piece before the previous pieces are written.
void Save::read_from_disk(size_t index) {
  const Source& source = pending_->at(index);
  for (int64_t done = 0; done < source.bytes; done += bounce_->part_bytes()) {
    Reading piece{index, done, std::min(bounce_->part_bytes(), source.bytes - done), nullptr, {}};
    if (reading_.size() == kAhead) write_what_was_read();
    piece.room = bounce_->take(piece.bytes);
    reading_.push_back(piece);  // before the read starts
    reading_.back().ticket = tiers_.disk->read(source.offset + done, piece.room, piece.bytes);
  }
}

// Writes the oldest piece that was read.
void Save::write_what_was_read() {
  constexpr int64_t kPart = 16 * 1024;  // elements; too few to be worth other threads
  const Reading piece = reading_.front();
  const Source& source = pending_->at(piece.index);
  tiers_.disk->wait(piece.ticket);
  reading_.pop_front();
  const int64_t first = piece.at / 4, numel = source.edits.defined() ? piece.bytes / 4 : 0;
  for (int64_t at = 0; at < numel; at += kPart) {
    const at::Tensor edits = source.edits.narrow(0, first + at, std::min(kPart, numel - at));
    device::take_edits(piece.room + at * 4, Dtype::kFp32, device::address_of(edits, nullptr),
                       exec::dtype_of(edits.scalar_type()), edits.numel());
  }
  bounce_->write(regions_[piece.index].offset + piece.at, piece.room, piece.bytes);
}

void Save::write_from_memory(const Source& source, const Region& region, int batch) {
  int64_t done = 0;
  if (source.device == nullptr && is_aligned(source.data)) {
    done = source.bytes / kBlockBytes * kBlockBytes;
    writer_->write(region.offset, source.data, done, batch);
  }
  while (done < source.bytes) {
    const int64_t bytes = std::min(bounce_->part_bytes(), source.bytes - done);
    char* room = bounce_->take(bytes);
    device::copy(room, {const_cast<char*>(source.data) + done, source.device}, bytes);
    if (source.device != nullptr) source.device->synchronize();
    bounce_->write(region.offset + done, room, bytes);
    done += bytes;
  }
}

// Writes in two alternating groups: while the system writes one group, the next one is started.
// Training may change the memory of a group as soon as that group is written.
void Save::write_regions() {
  std::array<std::vector<size_t>, 2> groups;
  int now = 0;
  int64_t bytes = 0;
  const auto is_read = [&](const std::vector<size_t>& group) {
    return std::any_of(reading_.begin(), reading_.end(), [&](const Reading& piece) {
      return std::count(group.begin(), group.end(), piece.index) > 0;
    });
  };
  const auto finish = [&](int group) {
    if (groups[group].empty()) return;
    while (is_read(groups[group])) write_what_was_read();
    bounce_->flush();
    writer_->flush(Bounce::kDirect + group);
    pending_->done(std::exchange(groups[group], {}));
  };
  while (const std::optional<size_t> index = pending_->next()) {
    const Source& source = pending_->at(*index);
    if (source.data == nullptr && source.bytes > 0) {
      read_from_disk(*index);
    } else {
      while (!reading_.empty()) write_what_was_read();  // makes room in the bounce memory
      write_from_memory(source, regions_[*index], Bounce::kDirect + now);
    }
    groups[now].push_back(*index);
    bytes += source.bytes;
    const bool hurries = pending_->hurries();
    if (bytes < kGroupBytes && !hurries) continue;
    bytes = 0;
    now = 1 - now;
    finish(now);
    if (hurries) finish(1 - now);
  }
  finish(0);
  finish(1);
}

// Runs after an error. If the disk stalls, it may still write to the bounce memory, which is then
// never freed.
void Save::stop_reading() {
  bool stalled = false;
  for (const Reading& piece : reading_) {
    try {
      tiers_.disk->wait(piece.ticket);
    } catch (const std::exception&) {
      // The first error is the one to report.
    }
    stalled |= !tiers_.disk->done(piece.ticket);
  }
  reading_.clear();
  if (stalled) mem::keep_for_good(std::move(bounce_));
}

std::string Save::write() {
  const std::string part = folder_ + "/" + file_name(rank_, ".json");
  std::string error;
  try {
    write_regions();
    layout_.file.checksum = writer_->finish();
    Manifest manifest;
    manifest.world = 1;
    manifest.about = contents_.about;
    manifest.state = contents_.state;
    manifest.front = contents_.front;
    manifest.ranks = {contents_.of_rank};
    manifest.files = {layout_.file};
    manifest.tensors = tensors_;
    write_text(part, manifest.text());
  } catch (const std::exception& failure) {
    error = failure.what();
    if (!exists(folder_))
      error = "[ckpt::save] rank 0 abandoned this save; its error gives the reason";
  }
  // The writer ends first, because its last requests still use the memory.
  writer_.reset();
  pending_->abandon();
  stop_reading();
  bounce_.reset();
  executor_.traffic().watch(nullptr);
  pending_.reset();
  if (error.empty()) return error;
  try {
    std::remove((folder_ + "/" + layout_.file.name).c_str());
    write_text(folder_ + "/" + file_name(rank_, ".failed"), error);
  } catch (const std::exception&) {
    // This error could not be written either, so rank 0 will report that this part is late.
  }
  return error;
}

// ---- the parts of all ranks

namespace {

// Sleeps until the file exists. Throws RuntimeFault with the error of any rank that failed.
void wait_for(const std::string& folder, int rank, int world, const std::function<bool()>& late) {
  std::chrono::milliseconds pause(1);
  while (!exists(folder + "/" + file_name(rank, ".json"))) {
    for (int other = 0; other < world; ++other) {
      const std::string failed = folder + "/" + file_name(other, ".failed");
      if (exists(failed)) throw RuntimeFault(concat("rank ", other, ": ", read_text(failed)));
    }
    if (late()) {
      throw RuntimeFault(concat("[ckpt::save] rank ", rank, " did not finish its part in \"",
                                folder, "\" within the timeout"));
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, std::chrono::milliseconds(10));
  }
}

}  // namespace

std::string commit(Draft& draft, int world, int keep, const std::function<bool()>& late) {
  std::vector<Manifest> parts;
  for (int rank = 0; rank < world; ++rank) {
    const std::string part = draft.path() + "/" + file_name(rank, ".json");
    wait_for(draft.path(), rank, world, late);
    parts.push_back(Manifest::parse(read_text(part), false));
  }
  write_text(draft.path() + "/" + kManifest, merge(parts).text());
  for (int rank = 0; rank < world; ++rank) {
    std::remove((draft.path() + "/" + file_name(rank, ".json")).c_str());
  }
  return draft.commit(keep);
}

}  // namespace penstock::ckpt
