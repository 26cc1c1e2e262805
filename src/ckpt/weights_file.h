#pragma once
// WeightsFile: a file of weights. Each part is read when it is needed. The file stays open, so it
// may be renamed or unlinked in the meantime. Usable from any thread.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

#include "penstock/export.h"
#include "src/mem/disk_tier.h"

namespace penstock {

class PENSTOCK_API WeightsFile {
 public:
  // Throws RuntimeFault if the file cannot be opened.
  explicit WeightsFile(std::string path);
  ~WeightsFile();
  WeightsFile(const WeightsFile&) = delete;
  WeightsFile& operator=(const WeightsFile&) = delete;

  // Reads `numel` values of the dtype `from`, beginning at byte `offset`, and stores them at `to`
  // in the dtype `into`, converted as Tensor::copy_() does. Uses at most 4 MiB of memory. Throws
  // RuntimeFault if the file is too short or was changed since it was opened.
  void read(int64_t offset, int64_t numel, at::ScalarType from, at::ScalarType into,
            void* to) const;
  // Returns `bytes` bytes at `offset` as a part of an extent in which they begin at `at`.
  static mem::FilePart part(const std::shared_ptr<const WeightsFile>& file, int64_t offset,
                            int64_t bytes, int64_t at);
  // Returns a hash of the file's size and of bytes at 256 places. Ranks compare these hashes to
  // detect that their files differ.
  uint64_t print() const;

 private:
  void read_raw(int64_t offset, int64_t bytes, void* to) const;
  void check_unchanged() const;

  const std::string path_;
  int fd_ = -1;
  int64_t bytes_ = 0, changed_ns_ = 0;  // when the file was opened
};

}  // namespace penstock
