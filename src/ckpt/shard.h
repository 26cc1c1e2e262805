#pragma once
// A shard: the safetensors file of one rank. Its tensors are grouped in regions; a region has the
// bytes of one buffer. Every region begins at a block boundary of the file. So regions can be
// written in any order, directly from the buffers, and without the page cache. A table after the
// regions has one checksum per granule of the file.
#include <array>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "src/ckpt/manifest.h"
#include "src/ckpt/safetensors.h"
#include "src/mem/block_io.h"

namespace penstock::ckpt {

struct FreeMemory {
  void operator()(char* data) const { std::free(data); }
};
// Whole blocks of zeros at a block-aligned address.
using Block = std::unique_ptr<char, FreeMemory>;
Block aligned_block(int64_t bytes);

// A range of elements of a tensor, stored as a safetensors tensor of one dimension.
struct Run {
  int tensor = 0;     // index among the layout's tensors
  int64_t begin = 0;  // index of its first element in the tensor
  int64_t numel = 0;
  int64_t at = 0;  // byte offset in the region
};
// The bytes of one buffer.
struct Region {
  int64_t bytes = 0;
  std::vector<Run> runs;  // in order, without overlap
  int64_t offset = 0;     // byte offset in the file; set by lay_out()
};

// The layout of a whole file, which is known before the first byte is written.
struct ShardLayout {
  std::string head;
  File file;  // without name and table checksum
};
// Sets the regions' offsets. Adds the slices of the runs to their tensors.
ShardLayout lay_out(std::vector<Region>& regions, std::vector<Tensor>& tensors);

// Makes the file and claims its space. Any thread may use the writer, but only one at a time.
class ShardWriter {
 public:
  static constexpr int kBatches = 6;

  // Throws RuntimeFault with path and bytes if there is not enough space.
  ShardWriter(std::string path, const ShardLayout& layout);
  ~ShardWriter();
  ShardWriter(const ShardWriter&) = delete;
  ShardWriter& operator=(const ShardWriter&) = delete;

  // Starts to write whole blocks. `data` must be block-aligned, and `offset` must be a block
  // boundary of the file. The bytes must not change until the batch is flushed.
  void write(int64_t offset, const char* data, int64_t bytes, int batch);
  // Blocks until the batch's writes have ended. Throws RuntimeFault with path and bytes.
  void flush(int batch);
  // Must be called after all regions were written. Writes the header and the table of checksums,
  // and makes the file durable. Returns the table's checksum.
  std::string finish();

 private:
  void submit(mem::BlockRequest request, int batch);

  const std::string path_;
  const File file_;
  const std::string head_;
  int fd_ = -1;
  std::vector<uint64_t> table_;
  std::mutex mutex_;
  std::condition_variable ended_;
  std::array<int, kBatches> in_flight_{};  // guarded by mutex_
  std::string error_;                      // guarded by mutex_; the first error
  std::unique_ptr<mem::BlockIo> io_;
};

// Reads ranges of a shard and checks every granule that it reads. Used by one thread.
class ShardReader {
 public:
  // Throws Damaged if the file is missing or its size differs from the manifest's.
  ShardReader(const std::string& folder, const File& file);
  ~ShardReader();
  ShardReader(const ShardReader&) = delete;
  ShardReader& operator=(const ShardReader&) = delete;

  // Throws Damaged if a checksum does not match. The first call also compares the table of
  // checksums with the manifest. So it notices a file that belongs to another rank or checkpoint.
  void read(int64_t offset, int64_t bytes, char* to);
  // Checks every byte of the file, and its header against the manifest's slices.
  void verify(const Manifest& manifest, int index);
  int64_t bytes_read() const { return bytes_read_; }

 private:
  void read_raw(int64_t offset, int64_t bytes, char* to);
  void check_table();
  const uint64_t* sums_of(int64_t first, int64_t count);
  void check_head(const Manifest& manifest, int index);

  const std::string path_;
  const File file_;
  int fd_ = -1;
  int64_t bytes_read_ = 0;
  bool table_checked_ = false, table_kept_ = false;
  std::vector<uint64_t> table_;  // all checksums if table_kept_, else those of the last read
  std::vector<char> block_;
  int64_t block_at_ = 0, block_bytes_ = 0;  // range of the file whose checked bytes are in block_
};

}  // namespace penstock::ckpt
