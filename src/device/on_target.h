#pragma once
// A fixture for tests that run kernels on each instruction set of the machine. The test's parameter
// comes from hwy::SupportedAndGeneratedTargets().
#include <hwy/highway.h>

#include <cstdint>

namespace penstock::samples {

template <typename Test>
class OnTarget : public Test {
 protected:
  void SetUp() override { choose(this->GetParam()); }
  void TearDown() override { choose(0); }  // 0 allows all targets of the machine again

 private:
  static void choose(int64_t targets) {
    hwy::SetSupportedTargetsForTest(targets);
    hwy::GetChosenTarget().DeInit();
  }
};

}  // namespace penstock::samples
