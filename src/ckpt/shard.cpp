#include "src/ckpt/shard.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <set>
#include <utility>

#include "src/base/text.h"
#include "src/ckpt/checksum.h"
#include "src/ckpt/damaged.h"
#include "src/ckpt/folder.h"

namespace penstock::ckpt {

namespace {

using mem::block_padded;
using mem::kBlockBytes;

constexpr int kDepth = 8;                     // requests in flight
constexpr int64_t kRequestBytes = 4LL << 20;  // largest size of one request
constexpr int64_t kReadBytes = 1LL << 20;

// A granule is so small that a read of a part has few extra bytes, and so large that the table
// stays small.
int64_t granule_of(int64_t data_bytes) { return data_bytes < (4LL << 20) ? 512 : kBlockBytes; }

int64_t pieces_of(const File& file) {
  return (file.table - file.data + file.granule - 1) / file.granule;
}

// Adds padding tensors, because the format requires that every byte belongs to a tensor.
void add_pad(std::vector<TensorHead>& heads, int64_t from, int64_t to, int* pads) {
  if (to > from) heads.push_back({concat("pad/", (*pads)++), "U8", {to - from}, from, to});
}

std::string table_name() { return "checksums"; }

// The name of a slice in the header.
std::string name_of(const Tensor& tensor, const Slice& slice) {
  return concat(tensor.key(), "[", slice.begin, ":", slice.end, "]");
}

}  // namespace

Block aligned_block(int64_t bytes) {
  void* data = nullptr;
  if (posix_memalign(&data, kBlockBytes, static_cast<size_t>(block_padded(bytes))) != 0) {
    throw RuntimeFault(concat("[ckpt::shard] cannot allocate ", bytes, " bytes"));
  }
  std::memset(data, 0, static_cast<size_t>(block_padded(bytes)));
  return Block(static_cast<char*>(data));
}

ShardLayout lay_out(std::vector<Region>& regions, std::vector<Tensor>& tensors) {
  std::vector<TensorHead> heads;
  int pads = 0;
  int64_t end = 0;
  for (Region& region : regions) {
    region.offset = end;
    int64_t at = region.offset;
    for (const Run& run : region.runs) {
      const Tensor& tensor = tensors[run.tensor];
      const int64_t from = region.offset + run.at;
      const int64_t to = from + run.numel * value_bytes(tensor.dtype);
      PENSTOCK_ASSERT(from >= at && to <= region.offset + region.bytes, tensor.key());
      add_pad(heads, at, from, &pads);
      if (run.numel > 0) {
        const std::string name = name_of(tensor, {run.begin, run.begin + run.numel});
        heads.push_back({name, tensor.dtype, {run.numel}, from, to});
      }
      at = to;
    }
    end = region.offset + block_padded(region.bytes);
    add_pad(heads, at, end, &pads);
  }
  ShardLayout layout;
  File& file = layout.file;
  file.granule = granule_of(end);
  const int64_t table_bytes = (end + file.granule - 1) / file.granule * 8;
  if (table_bytes > 0) {
    heads.push_back({table_name(), "U64", {table_bytes / 8}, end, end + table_bytes});
  }
  layout.head = write_head(heads, kBlockBytes);
  file.data = static_cast<int64_t>(layout.head.size());
  file.table = file.data + end;
  file.bytes = file.table + table_bytes;
  for (Region& region : regions) {
    region.offset += file.data;
    for (const Run& run : region.runs) {
      if (run.numel == 0) continue;
      tensors[run.tensor].slices.push_back(
          {run.begin, run.begin + run.numel, 0, region.offset + run.at});
    }
  }
  return layout;
}

// ---- writing

ShardWriter::ShardWriter(std::string path, const ShardLayout& layout)
    : path_(std::move(path)), file_(layout.file), head_(layout.head), table_(pieces_of(file_), 0) {
  fd_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (fd_ < 0)
    throw RuntimeFault("[ckpt::save] cannot create " + space_error(path_, file_.bytes, errno));
  int error = 0;
  do {
    error = ::fallocate(fd_, 0, 0, file_.bytes) == 0 ? 0 : errno;
  } while (error == EINTR);
  // If the file system cannot claim space, only a later write notices a full disk.
  if (error == EOPNOTSUPP || error == ENOSYS)
    error = ::ftruncate(fd_, file_.bytes) == 0 ? 0 : errno;
  if (error != 0) {
    ::close(fd_);
    ::unlink(path_.c_str());
    throw RuntimeFault("[ckpt::save] cannot write " + space_error(path_, file_.bytes, error));
  }
  ::fcntl(fd_, F_SETFL, O_DIRECT);  // not every file system supports it
  io_ = mem::BlockIo::best(kDepth);
}

ShardWriter::~ShardWriter() {
  io_.reset();  // waits for all requests
  if (fd_ >= 0) ::close(fd_);
}

void ShardWriter::write(int64_t offset, const char* data, int64_t bytes, int batch) {
  for (int64_t done = 0; done < bytes; done += file_.granule) {
    const int64_t piece = std::min(file_.granule, file_.table - offset - done);
    table_.at((offset + done - file_.data) / file_.granule) = checksum(data + done, piece);
  }
  for (int64_t done = 0; done < bytes; done += kRequestBytes) {
    {
      std::unique_lock lock(mutex_);
      ended_.wait(lock, [this] {
        return std::accumulate(in_flight_.begin(), in_flight_.end(), 0) < kDepth;
      });
      ++in_flight_[batch];
    }
    mem::BlockRequest request;
    request.file = fd_;
    request.write = true;
    request.data = const_cast<char*>(data) + done;
    request.offset = offset + done;
    request.bytes = std::min(kRequestBytes, bytes - done);
    submit(std::move(request), batch);
  }
}

// If the system made only a part of a write, submits the remaining part.
void ShardWriter::submit(mem::BlockRequest request, int batch) {
  mem::BlockRequest rest = request;
  request.done = [this, rest, batch](int64_t moved) mutable {
    if (moved == -EINTR || moved == -EAGAIN) moved = 0;
    if (moved >= 0 && moved < rest.bytes && moved % kBlockBytes == 0) {
      rest.data += moved;
      rest.offset += moved;
      rest.bytes -= moved;
      return submit(rest, batch);
    }
    const std::lock_guard lock(mutex_);
    if (moved < rest.bytes && error_.empty()) {
      error_ = "[ckpt::save] cannot write " +
               space_error(path_, file_.bytes, moved < 0 ? static_cast<int>(-moved) : EIO);
    }
    --in_flight_[batch];
    ended_.notify_all();
  };
  io_->submit(std::move(request));
}

void ShardWriter::flush(int batch) {
  std::unique_lock lock(mutex_);
  ended_.wait(lock, [this, batch] { return in_flight_[batch] == 0; });
  if (!error_.empty()) throw RuntimeFault(error_);
}

// The header has whole blocks. The table may end inside a block, so the file is truncated to its
// exact size after the table is written.
std::string ShardWriter::finish() {
  const auto head_bytes = static_cast<int64_t>(head_.size());
  const auto table_bytes = static_cast<int64_t>(table_.size() * sizeof(uint64_t));
  const Block head = aligned_block(head_bytes);
  std::memcpy(head.get(), head_.data(), head_.size());
  const Block table = aligned_block(table_bytes);
  std::copy(table_.begin(), table_.end(), reinterpret_cast<uint64_t*>(table.get()));
  const auto whole_blocks = [&](int64_t offset, const char* data, int64_t bytes) {
    for (int64_t done = 0; done < bytes;) {
      const ssize_t wrote =
          ::pwrite(fd_, data + done, static_cast<size_t>(bytes - done), offset + done);
      if (wrote < 0 && errno == EINTR) continue;
      if (wrote <= 0) {
        throw RuntimeFault("[ckpt::save] cannot write " + space_error(path_, file_.bytes, errno));
      }
      done += wrote;
    }
  };
  for (int batch = 0; batch < kBatches; ++batch) flush(batch);
  whole_blocks(0, head.get(), head_bytes);
  whole_blocks(file_.table, table.get(), block_padded(table_bytes));
  if (::ftruncate(fd_, file_.bytes) != 0 || ::fsync(fd_) != 0) {
    throw RuntimeFault("[ckpt::save] cannot sync " + space_error(path_, file_.bytes, errno));
  }
  return hex(checksum(table_.data(), table_bytes));
}

// ---- reading

ShardReader::ShardReader(const std::string& folder, const File& file)
    : path_(folder + "/" + file.name), file_(file) {
  // The path may be a pipe without a writer. Without O_NONBLOCK, opening it would block.
  fd_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  struct stat found{};
  if (fd_ < 0 || ::fstat(fd_, &found) != 0) {
    const std::string why = std::strerror(errno);
    if (fd_ >= 0) ::close(fd_);
    throw Damaged(concat("[ckpt::load] cannot read \"", path_, "\": ", why));
  }
  if (found.st_size == file_.bytes && S_ISREG(found.st_mode)) return;
  ::close(fd_);
  if (!S_ISREG(found.st_mode)) {
    throw Damaged(concat("[ckpt::load] \"", path_, "\" is not a regular file"));
  }
  throw Damaged(concat("[ckpt::load] \"", path_, "\" has ", found.st_size,
                       " bytes; its manifest says ", file_.bytes));
}

ShardReader::~ShardReader() { ::close(fd_); }

void ShardReader::read_raw(int64_t offset, int64_t bytes, char* to) {
  bytes_read_ += bytes;
  const std::string problem = read_at(fd_, offset, bytes, to);
  if (problem.empty()) return;
  throw Damaged(concat("[ckpt::load] cannot read ", bytes, " bytes at offset ", offset, " of \"",
                       path_, "\": ", problem));
}

void ShardReader::read(int64_t offset, int64_t bytes, char* to) {
  PENSTOCK_ASSERT(offset >= file_.data && offset + bytes <= file_.table, path_);
  if (!table_checked_) check_table();
  while (bytes > 0) {
    // Reads whole granules, up to kReadBytes at once, and keeps them for the next call.
    if (offset < block_at_ || offset >= block_at_ + block_bytes_) {
      const int64_t first = (offset - file_.data) / file_.granule;
      const int64_t wanted = offset + bytes - file_.data - first * file_.granule;
      const int64_t most = std::max<int64_t>(1, kReadBytes / file_.granule);
      const int64_t pieces = std::min(most, (wanted + file_.granule - 1) / file_.granule);
      block_bytes_ = 0;
      block_at_ = file_.data + first * file_.granule;
      const int64_t size = std::min(pieces * file_.granule, file_.table - block_at_);
      block_.resize(static_cast<size_t>(size));
      read_raw(block_at_, size, block_.data());
      const uint64_t* const sums = sums_of(first, pieces);
      for (int64_t i = 0; i < pieces; ++i) {
        const int64_t at = i * file_.granule;
        if (checksum(block_.data() + at, std::min(file_.granule, size - at)) == sums[i]) continue;
        throw Damaged(concat("[ckpt::load] \"", path_, "\" is damaged in the ", file_.granule,
                             " bytes from offset ", block_at_ + at));
      }
      block_bytes_ = size;
    }
    const int64_t part = std::min(bytes, block_at_ + block_bytes_ - offset);
    std::memcpy(to, block_.data() + (offset - block_at_), static_cast<size_t>(part));
    offset += part;
    bytes -= part;
    to += part;
  }
}

// Returns the checksums of granules, valid until the next call. check_table() may have read them.
const uint64_t* ShardReader::sums_of(int64_t first, int64_t count) {
  if (table_kept_) return table_.data() + first;
  table_.resize(static_cast<size_t>(count));
  read_raw(file_.table + first * 8, count * 8, reinterpret_cast<char*>(table_.data()));
  return table_.data();
}

void ShardReader::check_table() {
  RunningChecksum sum;
  const int64_t all = file_.bytes - file_.table;
  table_.resize(static_cast<size_t>((std::min(kReadBytes, all) + 7) / 8));
  auto* const part = reinterpret_cast<char*>(table_.data());
  for (int64_t at = file_.table; at < file_.bytes; at += kReadBytes) {
    const int64_t bytes = std::min(kReadBytes, file_.bytes - at);
    read_raw(at, bytes, part);
    sum.add(part, bytes);
  }
  table_kept_ = all <= kReadBytes;  // one read had all of it
  if (hex(sum.value()) != file_.checksum) {
    throw Damaged(concat("[ckpt::load] the checksums of \"", path_,
                         "\" are damaged, or the file belongs to another rank or checkpoint"));
  }
  table_checked_ = true;
}

// Checks that every tensor of the header is one that the manifest describes, or padding.
void ShardReader::check_head(const Manifest& manifest, int index) {
  std::string head(static_cast<size_t>(std::min<int64_t>(8, file_.bytes)), '\0');
  read_raw(0, static_cast<int64_t>(head.size()), head.data());
  head.resize(static_cast<size_t>(head_bytes(head, file_.bytes)));
  read_raw(0, static_cast<int64_t>(head.size()), head.data());
  const auto data = static_cast<int64_t>(head.size());
  std::multimap<std::pair<int64_t, int64_t>, std::string> expected;  // names by byte range
  for (const Tensor& tensor : manifest.tensors) {
    const int64_t size = value_bytes(tensor.dtype);
    for (const Slice& slice : tensor.slices) {
      const std::pair range{slice.offset, slice.offset + (slice.end - slice.begin) * size};
      if (slice.file == index) expected.emplace(range, name_of(tensor, slice) + tensor.dtype);
    }
  }
  int pads = 0;
  std::set<std::pair<int64_t, int64_t>> found;
  for (const TensorHead& tensor : parse_head(head, file_.bytes)) {
    const std::pair range{data + tensor.begin, data + tensor.end};
    found.insert(range);
    const auto [first, last] = expected.equal_range(range);
    const bool known = std::any_of(
        first, last, [&](const auto& one) { return one.second == tensor.name + tensor.dtype; });
    if (known && tensor.shape.size() == 1) continue;
    if (first == last && tensor.name == concat("pad/", pads)) {
      ++pads;
      continue;
    }
    if (range.first == file_.table && tensor.name == table_name()) continue;
    throw Damaged(concat("the header has \"", tensor.name, "\", which the manifest does not list"));
  }
  for (const auto& [range, name] : expected) {
    if (range.first < range.second && found.count(range) == 0) {
      throw Damaged(
          concat("the header does not have \"", name, "\" where the manifest says it is"));
    }
  }
}

void ShardReader::verify(const Manifest& manifest, int index) {
  try {
    check_head(manifest, index);
  } catch (const Damaged& damage) {
    throw Damaged(concat("[ckpt::load] \"", path_, "\" is damaged: ", damage.what()));
  }
  check_table();
  std::vector<char> block(static_cast<size_t>(kReadBytes));
  for (int64_t at = file_.data; at < file_.table; at += kReadBytes) {
    read(at, std::min(kReadBytes, file_.table - at), block.data());
  }
}

}  // namespace penstock::ckpt
