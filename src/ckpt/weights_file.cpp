#include "src/ckpt/weights_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string_view>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/ckpt/folder.h"

namespace penstock {

namespace {

constexpr int64_t kMostValues = 1 << 18;  // converted at once
constexpr int64_t kSamples = 256, kSampleBytes = 64;

int64_t nanoseconds(const timespec& time) {
  return static_cast<int64_t>(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
}

}  // namespace

WeightsFile::WeightsFile(std::string path) : path_(std::move(path)) {
  fd_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  struct stat found{};
  if (fd_ < 0 || ::fstat(fd_, &found) != 0) {
    const int error = errno;
    if (fd_ >= 0) ::close(fd_);
    throw RuntimeFault(
        concat("[ckpt::WeightsFile] cannot open \"", path_, "\": ", std::strerror(error)));
  }
  bytes_ = found.st_size;
  changed_ns_ = nanoseconds(found.st_mtim);
}

WeightsFile::~WeightsFile() { ::close(fd_); }

void WeightsFile::check_unchanged() const {
  struct stat found{};
  if (::fstat(fd_, &found) == 0 && found.st_size == bytes_ &&
      nanoseconds(found.st_mtim) == changed_ns_) {
    return;
  }
  throw RuntimeFault(concat("[ckpt::WeightsFile] \"", path_,
                            "\" was changed after penstock.init() read its header. Keep the file "
                            "as it is until initialize() has returned. If the parameters rest in "
                            "the file (frozen, on disk), keep it until close()"));
}

void WeightsFile::read_raw(int64_t offset, int64_t bytes, void* to) const {
  const std::string problem = ckpt::read_at(fd_, offset, bytes, to);
  if (problem.empty()) return;
  throw RuntimeFault(concat("[ckpt::WeightsFile] cannot read ", bytes, " bytes at offset ", offset,
                            " of \"", path_, "\": ", problem));
}

void WeightsFile::read(int64_t offset, int64_t numel, at::ScalarType from, at::ScalarType into,
                       void* to) const {
  check_unchanged();
  const auto size = static_cast<int64_t>(c10::elementSize(from));
  if (from == into) return read_raw(offset, numel * size, to);
  const at::Tensor part = at::empty({std::min(numel, kMostValues)}, at::TensorOptions(from));
  const at::Tensor made = at::from_blob(to, {numel}, at::TensorOptions(into));
  for (int64_t done = 0; done < numel;) {
    const int64_t count = std::min(numel - done, kMostValues);
    read_raw(offset + done * size, count * size, part.data_ptr());
    made.narrow(0, done, count).copy_(part.narrow(0, 0, count));
    done += count;
  }
}

mem::FilePart WeightsFile::part(const std::shared_ptr<const WeightsFile>& file, int64_t offset,
                                int64_t bytes, int64_t at) {
  return {file->path_,
          file,
          file->fd_,
          offset,
          bytes,
          at,
          [of = file.get()] {
            of->check_unchanged(); }};
}

uint64_t WeightsFile::print() const {
  uint64_t print = hash_text(concat(bytes_));
  std::array<char, kSampleBytes> sample{};
  const int64_t bytes = std::min(bytes_, kSampleBytes);
  for (int64_t i = 0; i < kSamples && bytes > 0; ++i) {
    read_raw((bytes_ - bytes) / (kSamples - 1) * i, bytes, sample.data());
    print = hash_text(std::string_view(sample.data(), static_cast<size_t>(bytes)), print);
  }
  return print;
}

}  // namespace penstock
