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

TEST(LossScale, ToleratesOverflowsUntilItDoubles) {
  LossScale scale({.initial = 8.0, .window = 1, .settle = 1, .hysteresis = 2}, true);
  EXPECT_TRUE(scale.overflow());
  EXPECT_EQ(scale.value(), 8.0);
  scale.good_step();  // does not count
  EXPECT_EQ(scale.value(), 8.0);
  EXPECT_TRUE(scale.overflow());  // the first one is not forgotten
  EXPECT_EQ(scale.value(), 4.0);
  EXPECT_TRUE(scale.overflow());
  EXPECT_EQ(scale.value(), 2.0);
  scale.good_step();
  scale.good_step();
  EXPECT_EQ(scale.value(), 4.0);
  scale.good_step();  // a window after it doubled
  EXPECT_EQ(scale.value(), 8.0);
  EXPECT_TRUE(scale.overflow());
  EXPECT_EQ(scale.value(), 8.0);
  LossScale restored({.initial = 8.0, .window = 1, .settle = 1, .hysteresis = 2}, true);
  restored.restore(scale.value(), scale.good_steps(), scale.tolerated());
  EXPECT_TRUE(restored.overflow());
  EXPECT_EQ(restored.value(), 4.0);
}

TEST(LossScale, ToleratesOverflowsUntilAGoodStep) {
  LossScale scale({.initial = 8.0, .window = 9, .min = 8.0, .hysteresis = 3, .refill = "step"},
                  true);
  for (int step = 0; step < 3; ++step) {
    EXPECT_TRUE(scale.overflow());
    EXPECT_TRUE(scale.overflow());
    scale.good_step();
    EXPECT_EQ(scale.value(), 8.0);
  }
  EXPECT_TRUE(scale.overflow());
  EXPECT_TRUE(scale.overflow());
  EXPECT_FALSE(scale.overflow());  // at its minimum
}

TEST(LossScale, AFixedScaleAndNoFp16NeverChange) {
  LossScale fixed({.initial = 8.0, .window = 0}, true);
  EXPECT_TRUE(fixed.needs_scaling());
  EXPECT_FALSE(LossScale({.initial = 1.0, .window = 0}, true).needs_scaling());
  EXPECT_FALSE(fixed.overflow());
  fixed.good_step();
  EXPECT_EQ(fixed.value(), 8.0);
  LossScale none({}, false);
  EXPECT_FALSE(none.overflow());
  EXPECT_EQ(none.value(), 1.0);
}

}  // namespace
}  // namespace penstock::engine
