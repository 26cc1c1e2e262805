#pragma once
// For tests of kernels on each instruction set of the machine: the parameter is one of
// hwy::SupportedAndGeneratedTargets().
#include <gtest/gtest.h>
#include <hwy/highway.h>

#include <cstdint>

namespace penstock::samples {

class OnTarget : public testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override { choose(GetParam()); }
  void TearDown() override { choose(0); }  // 0 = back to what the machine has

 private:
  static void choose(int64_t targets) {
    hwy::SetSupportedTargetsForTest(targets);
    hwy::GetChosenTarget().DeInit();
  }
};

}  // namespace penstock::samples
