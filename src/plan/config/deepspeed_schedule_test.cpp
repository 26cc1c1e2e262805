#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "penstock/deepspeed_config.h"
#include "penstock/error.h"

namespace penstock::deepspeed_schedule_test {
namespace {

TEST(DeepSpeedSchedule, WarmsUpAndDecays) {
  const DeepSpeedSchedule linear =
      DeepSpeedSchedule::make("WarmupDecayLR", {{"total_num_steps", 10},
                                                {"warmup_max_lr", 1.0},
                                                {"warmup_num_steps", 4},
                                                {"warmup_type", 1}});
  const double expected[] = {0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 5.0 / 6};
  for (int i = 0; i < 7; ++i) EXPECT_DOUBLE_EQ(linear.lr(i - 1), expected[i]) << i;
  EXPECT_DOUBLE_EQ(linear.lr(10), 0.0);
  EXPECT_DOUBLE_EQ(linear.lr(99), 0.0);
  const DeepSpeedSchedule log =
      DeepSpeedSchedule::make("WarmupLR", {{"warmup_max_lr", 2.0}, {"warmup_num_steps", 8}});
  EXPECT_DOUBLE_EQ(log.lr(3), 2.0 * std::log(4.0) / std::log(8.0));
  EXPECT_DOUBLE_EQ(log.lr(1000), 2.0);
}

TEST(DeepSpeedSchedule, CosineEndsAtItsFloor) {
  const DeepSpeedSchedule cosine = DeepSpeedSchedule::make(
      "WarmupCosineLR",
      {{"total_num_steps", 12}, {"warmup_num_steps", 4}, {"warmup_type", 1}, {"base_lr", 0.5}});
  EXPECT_DOUBLE_EQ(cosine.lr(2), 0.25);
  EXPECT_DOUBLE_EQ(cosine.lr(7), 0.5 * (1e-4 + (1 - 1e-4) * 0.5));
  EXPECT_NEAR(cosine.lr(50), 0.5e-4, 1e-18);
}

TEST(DeepSpeedSchedule, OneCycleRisesFallsAndDecays) {
  const DeepSpeedSchedule cycle = DeepSpeedSchedule::make("OneCycle", {{"cycle_min_lr", 1.0},
                                                                       {"cycle_max_lr", 3.0},
                                                                       {"cycle_first_step_size", 4},
                                                                       {"decay_step_size", 2},
                                                                       {"decay_lr_rate", 1.0}});
  EXPECT_DOUBLE_EQ(cycle.lr(-1), 1.0);
  EXPECT_DOUBLE_EQ(cycle.lr(0), 1.5);
  EXPECT_DOUBLE_EQ(cycle.lr(3), 3.0);
  EXPECT_DOUBLE_EQ(cycle.lr(5), 2.0);
  EXPECT_DOUBLE_EQ(cycle.lr(9), 1.0 / 2.0);
  EXPECT_DOUBLE_EQ(cycle.momentum(3), 0.8);
  EXPECT_DOUBLE_EQ(cycle.momentum(20), 0.9);
}

TEST(DeepSpeedSchedule, WhatCannotWorkIsRefused) {
  const std::pair<const char*, std::map<std::string, double>> cases[] = {
      {"Warmup", {}},
      {"WarmupLR", {{"warmup_max_lr", 1}, {"warmup_num_steps", 0}}},
      {"WarmupLR", {{"warmup_max_lr", 1}, {"warmup_steps", 3}}},
      {"WarmupDecayLR", {}},
      {"LRRangeTest", {{"lr_range_test_step_size", 0.5}}},
      {"OneCycle", {{"cycle_min_lr", 1}}},
  };
  for (const auto& [type, params] : cases) {
    EXPECT_THROW(DeepSpeedSchedule::make(type, params), ConfigError) << type;
  }
}

}  // namespace
}  // namespace penstock::deepspeed_schedule_test
