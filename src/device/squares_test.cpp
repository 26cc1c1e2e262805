#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "src/device/host_kernels.h"
#include "src/device/sum.h"

namespace penstock::device {
namespace {

// [Note: Squares] A norm must not depend on which of the two passes summed a gradient.
TEST(Squares, ThoseOfAReductionHaveTheBitsOfAPassOfTheirOwn) {
  for (const int64_t numel : {1, 33, 2048, 16385, 32768, 100003}) {
    std::vector<float> source(numel);
    std::mt19937 engine(1);
    std::uniform_real_distribution<float> draw(-2, 2);
    for (float& value : source) value = draw(engine);
    const std::vector<const void*> sources = {source.data(), source.data()};
    for (const Dtype dtype : {Dtype::kFp32, Dtype::kBf16, Dtype::kFp16}) {
      std::vector<float> out(numel);
      const double squares =
          sum_chunks_and_squares({out.data(), dtype, sources, Dtype::kFp32, numel, 0.3F});
      EXPECT_EQ(squares, host::sum_squares(out.data(), dtype, numel)) << numel;
    }
  }
}

}  // namespace
}  // namespace penstock::device
