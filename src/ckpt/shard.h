#pragma once
// A shard: the safetensors file of one rank. Its tensors are grouped in regions, each a buffer's
// bytes, which begin at blocks of the file and so can be written past the page cache from where
// they are, in any order. Behind them is a table of checksums, one for each granule of the file.
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
// Whole blocks of zeros, at a block.
using Block = std::unique_ptr<char, FreeMemory>;
Block aligned_block(int64_t bytes);

// A run of elements of a tensor, as a safetensors tensor of one dimension.
struct Run {
  int tensor = 0;     // index in the layout's
  int64_t begin = 0;  // element of the tensor
  int64_t numel = 0;
  int64_t at = 0;  // byte of the region
};
// The bytes of one buffer.
struct Region {
  int64_t bytes = 0;
  std::vector<Run> runs;  // in order, without overlap
  int64_t offset = 0;     // in the file; lay_out() says it
};

// Where everything of a file is, known before a byte is written.
struct ShardLayout {
  std::string head;
  File file;  // but for the name and the table's checksum
};
// Places the regions and notes in each tensor where its runs are.
ShardLayout lay_out(std::vector<Region>& regions, std::vector<Tensor>& tensors);

// Makes the file and claims its space. Any thread, but one at a time.
class ShardWriter {
 public:
  static constexpr int kBatches = 6;

  // Throws RuntimeFault with path and bytes where there is no room.
  ShardWriter(std::string path, const ShardLayout& layout);
  ~ShardWriter();
  ShardWriter(const ShardWriter&) = delete;
  ShardWriter& operator=(const ShardWriter&) = delete;

  // Begins to write: a block-aligned address, whole blocks, at a block of the file. The bytes stay
  // as they are until the batch is flushed.
  void write(int64_t offset, const char* data, int64_t bytes, int batch);
  // What was written in it is with the system. Throws RuntimeFault with path and bytes.
  void flush(int batch);
  // After all regions: the table, and everything durable. Returns the table's checksum.
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
  std::string error_;                      // guarded by mutex_; the first
  std::unique_ptr<mem::BlockIo> io_;
};

// Reads ranges of a shard and checks each granule that it touches. One thread.
class ShardReader {
 public:
  // Throws Damaged where the file is missing, of another size, or has another header than its
  // manifest says.
  ShardReader(const std::string& folder, const File& file);
  ~ShardReader();
  ShardReader(const ShardReader&) = delete;
  ShardReader& operator=(const ShardReader&) = delete;

  // Throws Damaged where a checksum is wrong.
  void read(int64_t offset, int64_t bytes, char* to);
  // Every byte of the file, the header against the manifest's slices included.
  void verify(const Manifest& manifest, int index);
  int64_t bytes_read() const { return bytes_read_; }

 private:
  void read_raw(int64_t offset, int64_t bytes, char* to);

  const std::string path_;
  const File file_;
  int fd_ = -1;
  int64_t bytes_read_ = 0;
  std::vector<char> block_;
  int64_t block_at_ = 0, block_bytes_ = 0;  // what of the file is in block_, checked
};

}  // namespace penstock::ckpt
