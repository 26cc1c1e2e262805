#include "penstock/config.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "penstock/error.h"

// GCC 12 assumes that a braced Case may destroy its strings before they are set (GCC bug 105562).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

namespace penstock::lr_schedule_test {
namespace {

struct Case {
  std::string name;
  ScheduleConfig schedule;
  std::vector<std::pair<int64_t, double>> factors;  // step -> factor
};

class LrScheduleTest : public testing::TestWithParam<Case> {};

TEST_P(LrScheduleTest, FactorAtStep) {
  for (const auto& [step, factor] : GetParam().factors)
    EXPECT_NEAR(lr_factor(GetParam().schedule, step), factor, 1e-12) << "step " << step;
}

INSTANTIATE_TEST_SUITE_P(
    Schedules, LrScheduleTest,
    testing::Values(
        Case{"None", {"none", 0, 0, 0.0}, {{1, 1.0}, {2, 1.0}, {1000000, 1.0}}},
        Case{"Constant", {"constant", 0, 0, 0.0}, {{1, 1.0}, {7, 1.0}}},
        Case{"WarmupStartsBelowThePeak",
             {"constant", 4, 0, 0.0},
             {{1, 0.25}, {2, 0.5}, {3, 0.75}, {4, 1.0}, {5, 1.0}}},
        Case{"WarmupOfOneStepIsNone", {"constant", 1, 0, 0.0}, {{1, 1.0}, {2, 1.0}}},
        Case{"Linear",
             {"linear", 2, 10, 0.2},
             {{1, 0.5}, {2, 1.0}, {4, 0.8}, {6, 0.6}, {10, 0.2}, {11, 0.2}, {500, 0.2}}},
        Case{"LinearWithoutWarmup", {"linear", 0, 4, 0.0}, {{1, 0.75}, {3, 0.25}, {4, 0.0}}},
        Case{"Cosine",
             {"cosine", 2, 10, 0.1},
             {{1, 0.5}, {2, 1.0}, {6, 0.55}, {10, 0.1}, {11, 0.1}}},
        Case{"WarmupFillsTheSchedule", {"cosine", 3, 3, 0.1}, {{2, 2.0 / 3}, {3, 1.0}, {4, 0.1}}}),
    [](const auto& info) { return info.param.name; });

TEST(LrSchedule, DecayNeverRises) {
  for (const char* type : {"linear", "cosine"}) {
    const ScheduleConfig schedule{type, 5, 40, 0.05};
    for (int64_t step = 5; step < 60; ++step)
      EXPECT_LE(lr_factor(schedule, step + 1), lr_factor(schedule, step)) << type << " " << step;
  }
}

TEST(LrSchedule, StepZeroIsABug) { EXPECT_THROW(lr_factor({}, 0), Bug); }

}  // namespace
}  // namespace penstock::lr_schedule_test
