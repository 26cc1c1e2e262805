// Claim: whatever the schedule, the table and the mesh, the plans of a model in stages train the
// same weights as a trainer that knows none of them. No order of sends and receives can get stuck,
// even if a send waits for its receive.
#include "src/plan/pipeline_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <map>
#include <optional>
#include <utility>

#include "src/base/text.h"
#include "src/plan/passes.h"
#include "tests/plans/interpreter.h"
#include "tests/plans/table_cases.h"

namespace penstock::plans::pipeline_test {
namespace {

using Transport = Exchange::Transport;

struct Ranks {
  int pipeline, node, local, tensor;
  Mesh mesh() const {
    return Mesh::of({{Axis::kPipeline, pipeline},
                     {Axis::kNode, node},
                     {Axis::kLocal, local},
                     {Axis::kTensor, tensor}});
  }
};

struct Order {
  const char* name;
  int virtual_stages;
};

constexpr Order kOrders[] = {
    {"gpipe", 1}, {"1f1b", 1}, {"interleaved", 2}, {"gpipe", 2}, {"zero_bubble", 1}};
constexpr Ranks kRanks[] = {{1, 1, 1, 1}, {2, 1, 1, 1}, {4, 1, 1, 1}, {2, 1, 2, 1}, {2, 1, 1, 2},
                            {2, 2, 1, 1}, {4, 1, 2, 1}, {2, 2, 2, 1}, {2, 1, 2, 2}, {4, 2, 1, 2}};

class PipelineTest : public testing::Test {
 protected:
  // Returns nothing if the schedule does not allow this shape.
  std::optional<Schedule> schedule_of(const Order& order, const Mesh& mesh, int num_micro) {
    const int ranks = mesh.size(Axis::kPipeline);
    if (ranks * order.virtual_stages > kNumUnits) return {};
    if (order.virtual_stages > 1 && num_micro % std::max(1, num_micro / ranks) != 0) return {};
    return make_schedule(order.name, {ranks, order.virtual_stages, num_micro});
  }

  Outcome run(const Table& table, const Mesh& mesh, const Schedule& schedule,
              const std::vector<Plan>& plans, Transport transport,
              Variant variant = Variant::kChain) {
    const auto& [problem, expected] = trained(variant);
    return interpret({.problem = problem,
                      .expected = expected,
                      .table = table,
                      .mesh = mesh,
                      .num_micro = schedule.num_micro(),
                      .num_stages = schedule.num_stages(),
                      .transport = transport},
                     plans);
  }

 private:
  const std::pair<Problem, Trained>& trained(Variant variant) {
    if (!problems_.contains(variant)) {
      const Problem problem = Problem::make(variant, 2);
      problems_.emplace(variant, std::pair(problem, train_reference(problem)));
    }
    return problems_.at(variant);
  }

  std::map<Variant, std::pair<Problem, Trained>> problems_;
};

TEST_F(PipelineTest, EveryTableUnderEverySchedule) {
  constexpr int64_t kBytes[] = {0, 500, int64_t{1} << 40};
  int num_cases = 0;
  size_t turn = 0;
  double most = 0;
  const auto check = [&](const TableCase& tables, const Mesh& mesh, const Schedule& schedule,
                         Variant variant, const std::string& order) {
    const ModelDesc model = describe(variant, mesh, schedule.num_stages());
    const Table table = tables.table(schedule.num_micro() > 1);
    std::vector<Plan> plans = plan_pipeline(table, model, mesh, schedule);
    const int64_t ahead = kBytes[turn % 3], bucket = kBytes[turn / 3 % 3];
    for (Plan& plan : plans) plan = fuse(prefetch(plan, model, ahead), model, bucket);
    const Transport transport = turn % 2 ? Transport::kRendezvous : Transport::kBuffered;
    const Outcome outcome = run(table, mesh, schedule, plans, transport, variant);
    ++num_cases;
    most = std::max(most, outcome.deviation);
    const std::string name = concat(variant_name(variant), ", ", order, " on ", mesh.text(), ": ",
                                    tables.text(), " prefetch=", ahead, " bucket=", bucket);
    ASSERT_EQ(outcome.error, "") << name << "\n" << plans[0].text();
    ASSERT_LT(outcome.deviation, 1e-10) << name << "\n" << plans[0].text();
  };
  for (const Ranks& ranks : kRanks) {
    const Mesh mesh = ranks.mesh();
    const size_t stride = mesh.world() > 8 ? 29 : mesh.world() > 2 ? 13 : 5;
    for (const TableCase& tables : table_cases()) {
      const bool waits_on_disk = tables.table(true).grads_wait_on_disk();
      for (const Order& order : kOrders) {
        for (const int num_micro : {1, 2, 3, 5}) {
          const std::optional<Schedule> schedule = schedule_of(order, mesh, num_micro);
          if (!schedule || turn++ % stride != 0) continue;
          const std::string name =
              concat(order.name, " x", order.virtual_stages, " of ", num_micro);
          for (const Variant variant : {Variant::kChain, Variant::kTiedRoot, Variant::kFrozen}) {
            const bool tied = variant == Variant::kTiedRoot, frozen = variant == Variant::kFrozen;
            if ((tied && waits_on_disk) || (variant != Variant::kChain && ranks.tensor > 1))
              continue;
            if (frozen && turn % 3 != 0) continue;
            check(tables, mesh, *schedule, variant, name);
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
  std::printf("%d cases, largest deviation %.1e\n", num_cases, most);
  EXPECT_GE(num_cases, 400);
}

// ---- planted faults

using Plant = std::function<bool(std::vector<Step>&, size_t)>;

struct Fault {
  const char* name;
  Plant plant;  // plants the fault at a step; returns false if the fault does not apply there
  size_t least_ranks = 2;
};

void drop(std::vector<Step>& steps, size_t at) {
  steps.erase(steps.begin() + static_cast<std::ptrdiff_t>(at));
}

Plant drops(Op op) {
  return [op](std::vector<Step>& steps, size_t at) {
    if (steps[at].op != op) return false;
    drop(steps, at);
    return true;
  };
}

// Returns the index of the next step of this kind, or steps.size().
size_t next(const std::vector<Step>& steps, size_t at, const std::function<bool(const Step&)>& is) {
  const auto begin = steps.begin() + static_cast<std::ptrdiff_t>(at) + 1;
  return static_cast<size_t>(std::find_if(begin, steps.end(), is) - steps.begin());
}

bool is_grad_move(const Step& step) { return step.op == Op::kMove && step.role == Role::kGrad; }

// Moves the step before the last backward of its unit.
Plant comes_too_early(bool (*is)(const Step&)) {
  return [is](std::vector<Step>& steps, size_t at) {
    if (!is(steps[at])) return false;
    for (size_t i = at; i > 0; --i) {
      const Step& above = steps[i - 1];
      if (above.op != Op::kBackward || above.units != steps[at].units) continue;
      const Step moved = steps[at];
      drop(steps, at);
      steps.insert(steps.begin() + static_cast<std::ptrdiff_t>(i - 1), moved);
      return true;
    }
    return false;
  };
}

const Fault kFaults[] = {
    {"a dropped send", drops(Op::kSend)},
    {"a dropped receive", drops(Op::kReceive)},
    {"swapped receives",
     [](std::vector<Step>& steps, size_t at) {
       if (steps[at].op != Op::kReceive) return false;
       const size_t other = next(steps, at, [&](const Step& step) {
         return step.op == Op::kReceive && step.role == steps[at].role;
       });
       const size_t used = next(steps, at, [](const Step& step) { return step.is_compute(); });
       if (other == steps.size() || other < used) return false;
       std::swap(steps[at], steps[other]);
       return true;
     }},
    {"another micro-batch is sent",
     [](std::vector<Step>& steps, size_t at) {
       if (steps[at].op != Op::kSend) return false;
       steps[at].micro ^= 1;
       return true;
     }},
    {"sent to the other side",
     [](std::vector<Step>& steps, size_t at) {
       if (steps[at].op != Op::kSend) return false;
       steps[at].hop = -steps[at].hop;
       return true;
     },
     3},  // in a ring of two, both neighbours are the same peer
    {"a gradient is moved before its last micro-batch", comes_too_early(is_grad_move)},
    {"a micro-batch has no backward", drops(Op::kBackward)},
    {"a micro-batch has two forwards",
     [](std::vector<Step>& steps, size_t at) {
       if (steps[at].op != Op::kForward || steps[at].units[0] + 1 == kNumUnits) return false;
       steps.insert(steps.begin() + static_cast<std::ptrdiff_t>(at), steps[at]);
       return true;
     }},
    {"no sum of gradients", drops(Op::kSum)},
    {"gradients are summed before the last of them",
     comes_too_early([](const Step& step) { return step.op == Op::kSum; })},
    {"gradients are summed twice",
     [](std::vector<Step>& steps, size_t at) {
       if (steps[at].op != Op::kSum) return false;
       steps.insert(steps.begin() + static_cast<std::ptrdiff_t>(at), steps[at]);
       return true;
     }},
    {"no sum of activations",
     [](std::vector<Step>& steps, size_t at) {
       if (steps[at].op != Op::kMove || steps[at].role != Role::kAct) return false;
       drop(steps, at);
       return true;
     }},
};

TEST_F(PipelineTest, NoPlantedFaultGoesUnseen) {
  std::map<std::string, int> num_seen;
  struct Setting {
    const char* strategy;
    Ranks ranks;
    Order order;
    Variant variant = Variant::kChain;
  };
  for (const Setting& setting :
       {Setting{"ddp", {2, 1, 2, 1}, {"1f1b", 1}},
        Setting{"zero3", {2, 1, 2, 1}, {"interleaved", 2}},
        Setting{"zero1", {4, 1, 1, 2}, {"1f1b", 1}}, Setting{"zero2", {2, 1, 1, 2}, {"gpipe", 1}},
        Setting{"zero3", {2, 1, 2, 1}, {"1f1b", 1}, Variant::kTiedRoot}}) {
    const Mesh mesh = setting.ranks.mesh();
    const Schedule schedule = *schedule_of(setting.order, mesh, 4);
    const Table table = preset(setting.strategy, {.accumulate = true});
    const ModelDesc model = describe(setting.variant, mesh, schedule.num_stages());
    const std::vector<Plan> plans = plan_pipeline(table, model, mesh, schedule);
    for (const Fault& fault : kFaults) {
      if (plans.size() < fault.least_ranks) continue;
      for (size_t rank = 0; rank < plans.size(); ++rank) {
        for (size_t i = 0; i < plans[rank].steps.size(); ++i) {
          for (const Transport transport : {Transport::kRendezvous, Transport::kBuffered}) {
            std::vector<Plan> broken = plans;
            if (!fault.plant(broken[rank].steps, i)) continue;
            const Outcome outcome = run(table, mesh, schedule, broken, transport, setting.variant);
            EXPECT_TRUE(!outcome.error.empty() || !(outcome.deviation < 1e-6))
                << setting.strategy << ": " << fault.name << " on stage rank " << rank << " at "
                << i << " '" << plans[rank].steps[i].text() << "' trained the same weights";
            ++num_seen[fault.name];
          }
        }
      }
    }
  }
  for (const Fault& fault : kFaults) {
    std::printf("%s: %d planted\n", fault.name, num_seen[fault.name]);
    EXPECT_GT(num_seen[fault.name], 0) << fault.name;
  }
}

// A deadlock ends at once with the position of every rank, and not at the timeout.
TEST_F(PipelineTest, WhatIsStuckIsSeenAtOnce) {
  const Mesh mesh = Mesh::of({{Axis::kPipeline, 2}});
  const Schedule schedule = make_schedule("1f1b", {2, 1, 4});
  const Table table = preset("ddp", {.accumulate = true});
  std::vector<Plan> plans =
      plan_pipeline(table, describe(Variant::kChain, mesh, 2), mesh, schedule);
  // Both stages send first: the first one its second micro-batch, the last one its gradient.
  std::vector<Step>& steps = plans[1].steps;
  const auto is_send = [](const Step& step) { return step.op == Op::kSend; };
  const auto is_receive = [](const Step& step) { return step.op == Op::kReceive; };
  const auto first_send = std::find_if(steps.begin(), steps.end(), is_send);
  const auto before = std::find_if(steps.begin() + 1, first_send, is_receive);
  ASSERT_NE(before, first_send);
  const Step late = *before;
  steps.insert(first_send + 1, late);
  steps.erase(before);
  const Outcome stuck = run(table, mesh, schedule, plans, Transport::kRendezvous);
  EXPECT_NE(stuck.error.find("every rank waits: rank 0 at 'send"), std::string::npos)
      << stuck.error;
  EXPECT_EQ(run(table, mesh, schedule, plans, Transport::kBuffered).error, "");
}

}  // namespace
}  // namespace penstock::plans::pipeline_test
