#pragma once
// BlockIo: asynchronous reads and writes of aligned blocks, on io_uring or on threads. Threads also
// read bytes at any offset.
#include <cstdint>
#include <functional>
#include <memory>

namespace penstock::mem {

inline constexpr int64_t kBlockBytes = 4096;  // offsets, lengths and addresses are multiples of it
constexpr int64_t block_padded(int64_t bytes) {
  return (bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
}

struct BlockRequest {
  int file = -1;  // descriptor
  bool write = false;
  char* data = nullptr;
  int64_t offset = 0, bytes = 0;
  // Called once, on a thread of the BlockIo, with -errno or with the number of bytes moved, which
  // may be smaller than `bytes`. `done` may call submit().
  std::function<void(int64_t)> done;
  // A read at any offset and address, through aligned memory; on threads only.
  bool any_offset = false;
};

// Any thread may submit. The destructor blocks until all requests have ended, without a time limit.
class BlockIo {
 public:
  virtual ~BlockIo() = default;
  virtual void submit(BlockRequest request) = 0;
  virtual const char* name() const = 0;

  // Returns io_uring if the kernel allows it (containers often forbid it), else threads.
  static std::unique_ptr<BlockIo> best(int depth);
  static std::unique_ptr<BlockIo> uring(int depth);  // null if it is not available
  static std::unique_ptr<BlockIo> threads(int num_threads);
};

}  // namespace penstock::mem
