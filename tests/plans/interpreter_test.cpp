// Claim: a strategy is nothing more than a table. Whatever the table, the mesh and the passes, a
// plan trains the same weights as a trainer that knows none of them.
#include "tests/plans/interpreter.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/plan/passes.h"
#include "src/plan/planner.h"
#include "tests/plans/exchange.h"
#include "tests/plans/table_cases.h"

namespace penstock::plans::interpreter_test {
namespace {

struct Setting {
  int64_t prefetch_bytes;
  int64_t bucket_bytes;
  int num_micro;

  std::string text() const {
    return concat("prefetch=", prefetch_bytes, " bucket=", bucket_bytes, " micro=", num_micro);
  }
};

std::vector<Setting> settings() {
  std::vector<Setting> all;
  for (const int64_t prefetch_bytes : {int64_t{0}, int64_t{500}, int64_t{1} << 40})
    for (const int64_t bucket_bytes : {int64_t{0}, int64_t{500}, int64_t{1} << 20})
      for (const int num_micro : {1, 2}) all.push_back({prefetch_bytes, bucket_bytes, num_micro});
  return all;
}

Plan make_plan(const Table& table, const ModelDesc& model, const Mesh& mesh,
               const Setting& setting) {
  const Plan plan = plan_step(table, model, mesh, setting.num_micro);
  return setting.num_micro == 1  // both orders of the passes are tested
             ? prefetch(fuse(plan, model, setting.bucket_bytes), model, setting.prefetch_bytes)
             : fuse(prefetch(plan, model, setting.prefetch_bytes), model, setting.bucket_bytes);
}

Mesh make_mesh(int node, int local, int tensor = 1) {
  return Mesh::of({{Axis::kNode, node}, {Axis::kLocal, local}, {Axis::kTensor, tensor}});
}

const Mesh kMeshes[] = {make_mesh(1, 1),    make_mesh(1, 2),   make_mesh(2, 1),
                        make_mesh(1, 4),    make_mesh(2, 2),   make_mesh(1, 1, 2),
                        make_mesh(2, 2, 2), make_mesh(2, 2, 4)};

class InterpreterTest : public testing::Test {
 protected:
  // Runs every table on the mesh. On large meshes each table runs with only a few of the 18
  // settings, in rotation (so `stride` must have no divisor in common with 18).
  void run_all(Variant variant, const Mesh& mesh, size_t stride) {
    const Problem problem = Problem::make(variant, 3);
    const Trained expected = train_reference(problem);
    const ModelDesc model = describe(variant, mesh);
    size_t turn = 0;
    for (const TableCase& tables : table_cases()) {
      for (const Setting& setting : settings()) {
        if (turn++ % stride != 0 || setting.num_micro > tables.most_micro) continue;
        const Table table = tables.table(setting.num_micro > 1);
        const Plan plan = make_plan(table, model, mesh, setting);
        const Outcome outcome = interpret({.problem = problem,
                                           .expected = expected,
                                           .table = table,
                                           .mesh = mesh,
                                           .num_micro = setting.num_micro},
                                          {plan});
        ++num_cases_;
        most_ = std::max(most_, outcome.deviation);
        const std::string name = concat(variant_name(variant), " on ", mesh.text(), ": ",
                                        tables.text(), " ", setting.text());
        ASSERT_EQ(outcome.error, "") << name << "\n" << plan.text();
        ASSERT_LT(outcome.deviation, 1e-10) << name << "\n" << plan.text();
      }
    }
  }

  int num_cases_ = 0;
  double most_ = 0;
};

TEST_F(InterpreterTest, EveryTableOnEveryMeshEqualsTheReference) {
  for (const Mesh& mesh : kMeshes)
    run_all(Variant::kChain, mesh, mesh.world() > 8 ? 23 : mesh.world() > 1 ? 7 : 1);
  for (const Variant variant : {Variant::kTiedRoot, Variant::kFrozen})
    for (const Mesh& mesh : kMeshes)
      if (mesh.size(Axis::kTensor) == 1) run_all(variant, mesh, mesh.world() > 2 ? 11 : 7);
  std::printf("%d cases, largest deviation %.1e\n", num_cases_, most_);
  EXPECT_GE(num_cases_, 200);
}

TEST_F(InterpreterTest, ARankThatSkipsACollectiveEndsAllRanks) {
  const Problem problem = Problem::make(Variant::kChain, 1);
  const Trained expected = train_reference(problem);
  const Mesh mesh = make_mesh(1, 2);
  const Table table = preset("zero3", {});
  const Plan plan = plan_step(table, describe(Variant::kChain, mesh), mesh, 1);
  const Training run{.problem = problem,
                     .expected = expected,
                     .table = table,
                     .mesh = mesh,
                     .timeout = std::chrono::milliseconds(200)};
  Plan shorter = plan;
  shorter.steps.resize(3);  // micro, gather, forward
  Plan reordered = plan;
  std::swap(reordered.steps[1], reordered.steps[4]);
  for (const Plan& other : {shorter, reordered}) {
    const Outcome outcome = interpret(run, {plan, other});
    EXPECT_NE(outcome.error, "");
  }
}

TEST(ExchangeTest, PeersThatAreLateOrDisagreeAreNamed) {
  Exchange late(std::chrono::milliseconds(10));
  Exchange unlike(std::chrono::milliseconds(10));
  const auto failure = [](Exchange& exchange, int rank, const std::string& text) {
    try {
      exchange.all(rank, {0, 1}, text, {{1.0}});
    } catch (const RuntimeFault& fault) {
      return std::string(fault.what());
    }
    return std::string();
  };
  EXPECT_EQ(failure(late, 0, "gather"),
            "[plans::exchange] rank 0 timed out waiting for peers at 'gather 1'");
  EXPECT_NE(failure(late, 1, "gather"), "");
  EXPECT_NE(failure(unlike, 0, "gather"), "");
  EXPECT_NE(failure(unlike, 1, "reduce"), "");
}

}  // namespace
}  // namespace penstock::plans::interpreter_test
