#pragma once
// For tests of kernels on each instruction set of the machine: a fixture with a parameter from
// hwy::SupportedAndGeneratedTargets().
#include <hwy/highway.h>

#include <cstdint>

namespace penstock::samples {

template <typename Test>
class OnTarget : public Test {
 protected:
  void SetUp() override { choose(this->GetParam()); }
  void TearDown() override { choose(0); }  // 0 = allows all targets of the machine again

 private:
  static void choose(int64_t targets) {
    hwy::SetSupportedTargetsForTest(targets);
    hwy::GetChosenTarget().DeInit();
  }
};

}  // namespace penstock::samples
