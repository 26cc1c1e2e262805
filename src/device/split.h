#pragma once
// Splits a range of values among threads in blocks of a fixed size, so that neither rounding nor
// the alignment of a block depends on the number of threads.
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>

namespace penstock::device::host {

inline constexpr int64_t kBlock = 16 * 1024;  // values
inline constexpr int64_t kSerialBelow =
    2 * kBlock;  // for fewer values, starting threads costs more than the work

// Calls run(begin, end) for parts that cover [0, numel). Each part begins at a multiple of kBlock.
template <class Run>
void for_each_part(int64_t numel, const Run& run) {
  if (numel < kSerialBelow) {
    if (numel > 0) run(int64_t{0}, numel);
    return;
  }
  const int64_t num_blocks = (numel + kBlock - 1) / kBlock;
  at::parallel_for(0, num_blocks, 1, [&](int64_t first, int64_t last) {
    run(first * kBlock, std::min(last * kBlock, numel));
  });
}

}  // namespace penstock::device::host
