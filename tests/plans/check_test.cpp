// One table for each principle by which tables are refused, beside a like one that runs.
#include "src/plan/check.h"

#include <gtest/gtest.h>

#include <ostream>
#include <string>
#include <vector>

#include "penstock/error.h"
#include "tests/plans/table_cases.h"

namespace penstock {
namespace {

using plans::Cell;
using plans::TableCase;

struct Refusal {
  const char* name;
  std::vector<Cell> cells;  // the first is the one that is named
  const char* principle;    // empty: it is not refused
  Conditions conditions{};
};

std::ostream& operator<<(std::ostream& out, const Refusal& refusal) { return out << refusal.name; }

// Of "zero1" in bf16 on two nodes of two ranks.
std::string refusal_of(const Refusal& refusal) {
  ModelDesc model;
  model.units.push_back({.name = "root", .flats = {{.numel = 512, .dtype = Dtype::kBf16}}});
  const Mesh mesh = Mesh::of({{Axis::kNode, 2}, {Axis::kLocal, 2}});
  const TableCase table{.strategy = "zero1", .cells = refusal.cells};
  try {
    check(table.table(/*accumulate=*/false), model, mesh, refusal.conditions);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

class RefusalTest : public testing::TestWithParam<Refusal> {};

TEST_P(RefusalTest, NamesCellValueAndPrinciple) {
  const Refusal& refusal = GetParam();
  const std::string said = refusal_of(refusal);
  if (refusal.principle[0] == '\0') {
    EXPECT_EQ(said, "");
    return;
  }
  const Cell& cell = refusal.cells.front();
  const std::string wanted =
      concat("[plan::check] table.", role_name(cell.role), ".", phase_name(cell.phase), " is \"",
             cell.place, "\": ", refusal.principle, ": ");
  EXPECT_EQ(said.substr(0, wanted.size()), wanted);
}

constexpr Role kParam = Role::kParam, kGrad = Role::kGrad, kOptim = Role::kOptim;
constexpr Phase kRest = Phase::kRest, kHold = Phase::kHold, kUpdate = Phase::kUpdate;
const Refusal kRefusals[] = {
    {"other_cells_run", {{kGrad, kHold, "PP@device:fp32"}}, ""},
    {"forward_on_host", {{kParam, Phase::kForward, "RR@host:bf16"}}, "compute"},
    {"forward_sharded", {{kParam, Phase::kForward, "RS@device:bf16"}}, "compute"},
    {"forward_wide", {{kParam, Phase::kForward, "RR@device:fp32"}}, "compute"},
    {"backward_on_disk", {{kParam, Phase::kBackward, "RR@disk:bf16"}}, "compute"},
    {"gradients_made_whole", {{kGrad, Phase::kBackward, "RR@device:bf16"}}, "compute"},
    {"update_on_disk",
     {{kOptim, kUpdate, "SS@disk:fp32"}, {kGrad, kUpdate, "SS@disk:bf16"}},
     "compute"},
    {"parameters_that_are_sums", {{kParam, kRest, "PP@device:bf16"}}, "sum"},
    {"state_that_is_a_sum", {{kOptim, kRest, "SP@device:fp32"}}, "sum"},
    {"updates_with_a_sum", {{kGrad, kUpdate, "PP@device:bf16"}}, "sum"},
    {"parameters_in_another_dtype", {{kParam, kRest, "RR@device:fp16"}}, "precision"},
    {"gradients_in_another_dtype", {{kGrad, kHold, "PP@device:fp16"}}, "precision"},
    {"wide_gradients_run", {{kGrad, kHold, "SS@device:fp32"}}, ""},
    {"moments_in_fp16",
     {{kOptim, kRest, "SS@device:fp16"}, {kOptim, kUpdate, "SS@device:fp16"}},
     "moments"},
    {"moments_of_two_dtypes", {{kOptim, kRest, "SS@device:bf16"}}, "moments"},
    {"gradients_of_another_part", {{kGrad, kUpdate, "RS@device:bf16"}}, "together"},
    {"gradients_on_another_tier", {{kGrad, kUpdate, "SS@host:bf16"}}, "together"},
    {"gradients_with_their_state",
     {{kGrad, kUpdate, "RS@device:bf16"}, {kOptim, kUpdate, "RS@device:fp32"}},
     ""},
    {"own_optimizer_on_disk",
     {{kOptim, kRest, "SS@disk:fp32"}},
     "own optimizer",
     {.own_optimizer = true}},
    {"own_optimizer_that_moves",
     {{kOptim, kRest, "RS@device:fp32"}},
     "own optimizer",
     {.own_optimizer = true}},
    {"late_without_a_fetch", {{kParam, kRest, "RR@device:bf16"}}, "late", {.late_update = true}},
    {"late_with_a_fetch", {{kParam, kRest, "SS@device:bf16"}}, "", {.late_update = true}},
};
INSTANTIATE_TEST_SUITE_P(Check, RefusalTest, testing::ValuesIn(kRefusals),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace penstock
