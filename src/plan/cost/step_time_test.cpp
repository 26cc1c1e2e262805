#include "src/plan/cost/step_time.h"

#include <gtest/gtest.h>

namespace penstock::step_time_test {
namespace {

// Round numbers, so that every time below can be computed by hand.
constexpr Machine kMachine{1e12, 100, 50, 20, 10, 280, 2800};

struct TimeCase {
  const char* name;
  Work work;
  std::map<std::string, std::map<std::string, int64_t>> sent;
  double forward, backward, update;
  const char* longest;
  std::map<std::string, int64_t> coded{};
};

const TimeCase kCases[] = {
    {"nothing", {}, {}, 0, 0, 0, ""},
    // 2 x 1e9 x 1e3 = 2e12 FLOPs forward, twice that backward.
    {"compute alone",
     {1e3, 1'000'000'000, 1'000'000'000, 0, false},
     {},
     2,
     4,
     0,
     "backward, compute"},
    {"a frozen model computes only the gradient of its input",
     {1e3, 1'000'000'000, 0, 0, false},
     {},
     2,
     2,
     0,
     "forward, compute"},
    {"a link under compute is hidden",
     {1e3, 1'000'000'000, 1'000'000'000, 0, false},
     {{"forward", {{"local", 150}}}, {"backward", {{"node", 300}}}},
     2,
     6,
     0,
     "backward, node link"},
    {"links of one phase overlap",
     {},
     {{"forward", {{"local", 100}, {"device-host", 100}, {"host-disk", 20}}}},
     5,
     0,
     0,
     "forward, device-host link"},
    {"the codec works before and after the exchange",
     {},
     {{"forward", {{"local", 100}, {"node", 100}}}},
     3,
     0,
     0,
     "forward, node link",
     {{"forward", 280}}},
    {"the device's optimizer", {0, 0, 0, 1000, false}, {}, 0, 0, 10, "update, optimizer"},
    {"the CPU's optimizer, ten times slower here",
     {0, 0, 0, 1000, true},
     {},
     0,
     0,
     100,
     "update, optimizer"},
    {"the disk is slower than the CPU's optimizer",
     {0, 0, 0, 1000, true},
     {{"update", {{"host-disk", 2400}, {"device-host", 200}}}},
     0,
     0,
     240,
     "update, host-disk link"},
};

// The sums of tensor ranks take 100 of the 150 bytes on the link.
TEST(StepTimeTest, ComputingWaitsForLayers) {
  Ledger ledger;
  ledger.sent["forward"]["local"] = 150;
  ledger.waited["forward"]["local"] = 100;
  const StepTime time = step_time({1e3, 1'000'000'000, 1'000'000'000, 0, false}, ledger, kMachine);
  EXPECT_DOUBLE_EQ(time.forward, 2 + 1);
  EXPECT_DOUBLE_EQ(time.backward, 4);
  EXPECT_EQ(time.longest, "backward, compute");
}

TEST(StepTimeTest, PhasesTakeTheirLongestLane) {
  for (const TimeCase& c : kCases) {
    Ledger ledger;
    ledger.sent = c.sent;
    ledger.coded = c.coded;
    const StepTime time = step_time(c.work, ledger, kMachine);
    EXPECT_DOUBLE_EQ(time.forward, c.forward) << c.name;
    EXPECT_DOUBLE_EQ(time.backward, c.backward) << c.name;
    EXPECT_DOUBLE_EQ(time.update, c.update) << c.name;
    EXPECT_DOUBLE_EQ(time.total(), c.forward + c.backward + c.update) << c.name;
    EXPECT_EQ(time.longest, c.longest) << c.name;
  }
}

}  // namespace
}  // namespace penstock::step_time_test
