// Plans with one planted fault must fail or train other weights; otherwise the interpreter proves
// nothing.
#include <gtest/gtest.h>

#include <cstdio>
#include <functional>
#include <map>
#include <optional>

#include "src/base/text.h"
#include "src/plan/planner.h"
#include "tests/plans/interpreter.h"
#include "tests/plans/table_cases.h"

namespace penstock::plans::faults_test {
namespace {

struct Fault {
  const char* name;
  // `concerns`: whether the fault can be planted in a step. `plant`: the new step; nullopt drops
  // it.
  std::function<bool(const Step&)> concerns;
  std::function<std::optional<Step>(Step)> plant;
  bool only_first_micro = false;
};

bool has(const Step& step, MoveKind kind) {
  for (const Move& move : step.moves)
    if (move.kind == kind) return true;
  return false;
}

Fault instead(const char* name, MoveKind wrong_for, const std::function<void(Move&)>& change,
              bool only_first_micro = false) {
  return {name, [=](const Step& step) { return has(step, wrong_for); },
          [=](Step step) -> std::optional<Step> {
            for (Move& move : step.moves)
              if (move.kind == wrong_for) change(move);
            return step;
          },
          only_first_micro};
}

std::vector<Fault> faults() {
  const auto drops = [](const char* name, Op op, std::optional<Role> role) {
    return Fault{name,
                 [=](const Step& step) { return step.op == op && (!role || step.role == role); },
                 [](const Step&) { return std::nullopt; }};
  };
  const auto slices = [](Move& move) { move.kind = MoveKind::kSlice; };
  const auto stays_local = [](Move& move) { move.axes = {Axis::kLocal}; };
  return {
      drops("no param move", Op::kMove, Role::kParam),
      drops("no grad move", Op::kMove, Role::kGrad),
      drops("no optim move", Op::kMove, Role::kOptim),
      drops("no act move", Op::kMove, Role::kAct),
      drops("no publish", Op::kPublish, std::nullopt),
      drops("no drop", Op::kDrop, std::nullopt),
      drops("no update", Op::kUpdate, std::nullopt),
      instead("slice for all_gather", MoveKind::kAllGather, slices),
      instead("slice for reduce_scatter", MoveKind::kReduceScatter, slices),
      instead("slice for all_reduce", MoveKind::kAllReduce, slices),
      // From the second micro-batch on, hpz holds a copy for which a local gather is right.
      instead("local all_gather", MoveKind::kAllGather, stays_local, true),
      instead("local reduce_scatter", MoveKind::kReduceScatter, stays_local),
      instead("local all_reduce", MoveKind::kAllReduce, stays_local),
  };
}

TEST(FaultsTest, NoPlantedFaultGoesUnseen) {
  const Problem problem = Problem::make(Variant::kChain, 2);
  const Trained expected = train_reference(problem);
  const std::vector<TableCase> cases = {
      {.strategy = "ddp"},
      {.strategy = "zero1"},
      {.strategy = "zero2"},
      {.strategy = "zero3"},
      {.strategy = "hpz"},
      {.strategy = "mics"},
      {.strategy = "zero3", .optim_tier = Tier::kDisk, .param_tier = Tier::kHost}};
  std::map<std::string, int> num_seen;
  for (const TableCase& tables : cases) {
    const Mesh mesh = Mesh::of(
        {{Axis::kNode, 2}, {Axis::kLocal, 2}, {Axis::kTensor, tables.strategy == "zero2" ? 2 : 1}});
    const Table table = tables.table(true);
    const ModelDesc model = describe(Variant::kChain, mesh);
    const Plan plan = plan_step(table, model, mesh, 2);
    const Training run{
        .problem = problem, .expected = expected, .table = table, .mesh = mesh, .num_micro = 2};
    ASSERT_EQ(interpret(run, {plan}).error, "");
    for (const Fault& fault : faults()) {
      for (size_t i = 0; i < plan.steps.size(); ++i) {
        if (fault.only_first_micro && plan.steps[i].micro > 0) break;
        if (!fault.concerns(plan.steps[i])) continue;
        Plan broken = plan;
        const std::optional<Step> step = fault.plant(plan.steps[i]);
        if (step) {
          broken.steps[i] = *step;
        } else {
          broken.steps.erase(broken.steps.begin() + static_cast<std::ptrdiff_t>(i));
        }
        if (broken == plan) continue;  // the plan already gathers locally
        const Outcome outcome = interpret(run, {broken});
        EXPECT_TRUE(!outcome.error.empty() || !(outcome.deviation < 1e-6))
            << tables.text() << ": " << fault.name << " at " << i << " '" << plan.steps[i].text()
            << "' trained the same weights";
        ++num_seen[fault.name];
      }
    }
  }
  for (const Fault& fault : faults()) {
    std::printf("%s: %d planted\n", fault.name, num_seen[fault.name]);
    EXPECT_GT(num_seen[fault.name], 0) << fault.name;
  }
}

}  // namespace
}  // namespace penstock::plans::faults_test
