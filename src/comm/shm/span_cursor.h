#pragma once
// SpanCursor: a position in a list of memory spans that are read or written in order. The spans
// belong to this process or to another process. Used by one thread.
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "src/comm/shm/layout.h"

namespace penstock::comm {

class SpanCursor {
 public:
  static constexpr int kBatch = 16;

  SpanCursor() = default;
  explicit SpanCursor(std::vector<ShmSpan> spans) : spans_(std::move(spans)) {
    for (const ShmSpan& one : spans_) bytes_ += static_cast<int64_t>(one.bytes);
    pass_empty();
  }

  int64_t bytes() const { return bytes_; }  // bytes of all spans
  int64_t left() const { return bytes_ - passed_; }
  const std::vector<ShmSpan>& spans() const { return spans_; }

  // Returns the next spans, at most `most` bytes in total.
  std::span<iovec> peek(std::array<iovec, kBatch>& into, int64_t most) const {
    size_t count = 0, offset = offset_;
    for (size_t i = at_; i < spans_.size() && count < kBatch && most > 0; ++i, offset = 0) {
      const auto bytes = std::min<size_t>(spans_[i].bytes - offset, static_cast<size_t>(most));
      if (bytes == 0) continue;
      into[count++] = {address(i, offset), bytes};
      most -= static_cast<int64_t>(bytes);
    }
    return {into.data(), count};
  }

  // Returns the rest of the current span, at most `most` bytes. Only for memory of this process.
  std::span<char> next(int64_t most) const {
    if (at_ == spans_.size()) return {};
    const auto bytes = std::min<size_t>(spans_[at_].bytes - offset_, static_cast<size_t>(most));
    return {static_cast<char*>(address(at_, offset_)), bytes};
  }

  void pass(int64_t bytes) {
    passed_ += bytes;
    auto left = static_cast<uint64_t>(bytes);
    while (left > 0) {
      const uint64_t step = std::min(spans_[at_].bytes - offset_, left);
      offset_ += step;
      left -= step;
      pass_empty();
    }
  }

 private:
  void* address(size_t i, size_t offset) const {
    return reinterpret_cast<void*>(spans_[i].address + offset);
  }
  void pass_empty() {
    while (at_ < spans_.size() && offset_ == spans_[at_].bytes) {
      ++at_;
      offset_ = 0;
    }
  }

  std::vector<ShmSpan> spans_;
  size_t at_ = 0;
  uint64_t offset_ = 0;  // byte offset in span at_
  int64_t bytes_ = 0, passed_ = 0;
};

}  // namespace penstock::comm
