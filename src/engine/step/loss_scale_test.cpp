#include "src/engine/step/loss_scale.h"

#include <gtest/gtest.h>

namespace penstock::engine {
namespace {

TEST(LossScale, HalvesOnOverflowAndDoublesAfterAWindow) {
  LossScale scale({.initial = 8.0, .window = 2, .min = 3.0}, true);
  EXPECT_EQ(scale.value(), 8.0);
  EXPECT_TRUE(scale.overflow());
  EXPECT_EQ(scale.value(), 4.0);
  scale.good_step();
  EXPECT_TRUE(scale.overflow());  // the count of good steps starts again
  EXPECT_EQ(scale.value(), 3.0);
  EXPECT_FALSE(scale.overflow());
  scale.good_step();
  EXPECT_EQ(scale.value(), 3.0);
  scale.good_step();
  EXPECT_EQ(scale.value(), 6.0);
}

TEST(LossScale, AFixedScaleAndNoFp16NeverChange) {
  LossScale fixed({.initial = 8.0, .window = 0}, true);
  EXPECT_FALSE(fixed.overflow());
  fixed.good_step();
  EXPECT_EQ(fixed.value(), 8.0);
  LossScale none({}, false);
  EXPECT_FALSE(none.overflow());
  EXPECT_EQ(none.value(), 1.0);
}

}  // namespace
}  // namespace penstock::engine
