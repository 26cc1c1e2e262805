// Claim: a table trains exactly like plain torch, or initialize refuses it and names the cell.
//
//   tables_test                  60 draws, and every table of the plan tests
//   tables_test --draws 0:400    those draws, and a summary
//   tables_test --draw 17        one draw in this process, for a debugger
//   ... --bare                   their presets, without the changed cells
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <limits>
#include <set>
#include <sstream>
#include <string>
#include <thread>

#include "src/base/text.h"
#include "tests/parity/tables/children.h"
#include "tests/parity/tables/draw.h"
#include "tests/parity/tables/outcome.h"
#include "tests/parity/tables/sweep.h"
#include "tests/parity/tables/training.h"
#include "tests/plans/table_cases.h"

namespace penstock::tables {
namespace {

constexpr int kDailyDraws = 60;
// Draws that once failed: a late gradient was gathered in one dtype into a sum of another; a sum on
// the host was widened before it had arrived from the device; optimizer state that rests whole was
// updated beyond this rank's part.
constexpr uint64_t kOnceBroken[] = {238, 249, 275, 437};
constexpr double kLeastExact = 0.4;  // a test that refuses everything proves nothing

int num_jobs() { return static_cast<int>(std::max(1U, std::thread::hardware_concurrency())); }

std::string read_document() {
  const std::ifstream file(std::string(PENSTOCK_SOURCE_DIR) + "/docs/tables.md");
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

std::vector<Draw> draws_of(uint64_t first, uint64_t end, bool bare) {
  std::vector<Draw> draws;
  for (uint64_t seed = first; seed < end; ++seed) {
    draws.push_back(draw(seed));
    if (bare) draws.back().cells.clear();
  }
  return draws;
}

// Returns one entry for each outcome that must not occur, with the command that repeats it.
std::vector<std::string> complaints(const std::vector<Draw>& draws,
                                    const std::vector<Outcome>& outcomes) {
  const std::string document = read_document();
  std::vector<std::string> all;
  for (size_t i = 0; i < draws.size(); ++i) {
    const Outcome& outcome = outcomes[i];
    const std::string again =
        concat("\n  repeat: ", program_invocation_name, " --draw ", draws[i].seed, "\n");
    const std::string principle = principle_of(outcome.why);
    if (outcome.kind == Kind::kBroken) {
      all.push_back(concat(draws[i].text(), "\n  broken: ", outcome.why, again));
    } else if (outcome.kind == Kind::kRefused && !is_documented(principle, document)) {
      all.push_back(concat(draws[i].text(), "\n  refused for a reason that docs/tables.md, ",
                           "\"What is refused\", does not have: ", outcome.why, again));
    }
  }
  const double share = summarize(outcomes).exact_share();
  if (share < kLeastExact) all.push_back(concat("only ", 100 * share, "% are exact\n"));
  return all;
}

TEST(Draws, AreAFunctionOfTheSeedAndReachEveryCell) {
  std::set<std::string> cells, strategies;
  for (uint64_t seed = 0; seed < 400; ++seed) {
    const Draw one = draw(seed);
    EXPECT_EQ(one.text(), draw(seed).text());
    EXPECT_FALSE(one.cells.empty());
    EXPECT_LE(one.cells.size(), 4U);
    strategies.insert(one.strategy);
    const Table preset = penstock::preset(one.strategy, one.options);
    for (const Cell& cell : one.cells) {
      cells.insert(cell.name());
      EXPECT_FALSE(cell.place == preset.at(cell.role, cell.phase)) << one.text();
    }
  }
  EXPECT_EQ(cells.size(), 9U);
  EXPECT_GE(strategies.size(), 6U);
}

TEST(Outcomes, NameTheirPrinciple) {
  const std::string refusal =
      R"([plan::check] table.grad.hold is "RR@host:fp32": no way back: a sum is not undone)";
  EXPECT_EQ(principle_of(refusal), "no way back");
  EXPECT_EQ(principle_of("[exec::Executor] table.grad.hold is odd"), "");
  const std::string document =
      "# Tables\n- no way back: not here\n## What is refused\n\n- **no way back**: sums\n"
      "## Other\n- elsewhere\n";
  EXPECT_TRUE(is_documented("no way back", document));
  EXPECT_FALSE(is_documented("elsewhere", document));
  EXPECT_FALSE(is_documented("", document));
}

TEST(Outcomes, WhatIsOffIsSeen) {
  Draw one;
  one.strategy = "ddp";
  one.loop.read = one.loop.look_early = true;
  using Change = std::function<void(Trace&)>;
  const auto add = [](Tensors& to, double value) { to.at("embed").add_(value); };
  const std::vector<Change> changes = {
      [](Trace&) {},
      [&](Trace& trace) { add(trace.gradients[0], 1e-4); },
      [&](Trace& trace) { add(trace.weights, 1e-4); },
      [&](Trace& trace) { add(trace.own, 1e-4); },
      [&](Trace& trace) { add(trace.reads[0], std::numeric_limits<double>::quiet_NaN()); },
      [&](Trace& trace) { trace.weights.erase("blocks.2.inner.bias"); },
      [&](Trace& trace) { trace.losses[1] *= 1.001; },
      [&](Trace& trace) { trace.norms.back() = std::numeric_limits<double>::quiet_NaN(); },
  };
  const auto ended =
      run_children(static_cast<int>(changes.size()), 2, std::chrono::seconds(60), [&](int index) {
        std::vector<Trace> traces = {train_plainly(one, Dtype::kFp32)};
        changes[static_cast<size_t>(index)](traces[0]);
        return what_is_off(one, traces).empty() ? 0 : 1;
      });
  for (size_t i = 0; i < ended.size(); ++i) {
    EXPECT_EQ(ended[i].signal, 0) << ended[i].output;
    EXPECT_EQ(ended[i].status, i == 0 ? 0 : 1) << "change " << i;
  }
}

TEST(Children, TellHowTheyEnded) {
  const auto ended = run_children(3, 2, std::chrono::seconds(3), [](int index) {
    std::printf("I am %d", index);
    std::fflush(stdout);
    if (index == 0) std::raise(SIGKILL);
    while (index == 1) std::this_thread::yield();
    return 7;
  });
  EXPECT_EQ(ended[0].signal, SIGKILL);
  EXPECT_TRUE(ended[1].timed_out);
  EXPECT_EQ(ended[2].status, 7);
  EXPECT_FALSE(ended[2].timed_out);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(ended[i].output, concat("I am ", i));
}

// This shows that a failure with changed cells comes from the cells and not from the loop.
TEST(Tables, PresetsAreExactInEveryLoop) {
  const std::vector<Draw> draws = draws_of(0, 60, /*bare=*/true);
  const std::vector<Outcome> outcomes = sweep(draws, num_jobs());
  for (size_t i = 0; i < draws.size(); ++i)
    EXPECT_EQ(outcomes[i].kind, Kind::kExact) << draws[i].text() << "\n" << outcomes[i].why;
}

TEST(Tables, DrawsAreExactOrRefused) {
  std::vector<Draw> draws = draws_of(0, kDailyDraws, /*bare=*/false);
  for (const uint64_t seed : kOnceBroken) draws.push_back(draw(seed));
  const std::vector<Outcome> outcomes = sweep(draws, num_jobs());
  for (const std::string& complaint : complaints(draws, outcomes)) ADD_FAILURE() << complaint;
  std::fputs(summarize(outcomes).text().c_str(), stdout);
}

Draw draw_of(const plans::TableCase& tables, const Mesh& mesh, int num_micro) {
  Draw one;
  one.world = mesh.world();
  one.nodes = mesh.size(Axis::kNode);
  one.strategy = tables.strategy;
  one.loop.accumulate = num_micro;
  one.options = {.precision = tables.precision,
                 .accumulate = num_micro > 1,
                 .optim_tier = tables.optim_tier,
                 .param_tier = tables.param_tier,
                 .grad_tier = tables.grad_tier};
  for (const plans::Cell& cell : tables.cells)
    one.cells.push_back({cell.role, cell.phase, Placement::parse(cell.place)});
  return one;
}

TEST(Tables, ThoseOfThePlanTestsAreExact) {
  std::vector<Draw> draws;
  for (const plans::TableCase& tables : plans::table_cases()) {
    for (const Mesh& mesh :
         {Mesh(), Mesh::of({{Axis::kLocal, 2}}), Mesh::of({{Axis::kNode, 2}, {Axis::kLocal, 2}})}) {
      for (const int num_micro : std::set<int>{1, tables.most_micro})
        draws.push_back(draw_of(tables, mesh, num_micro));
    }
  }
  const std::vector<Outcome> outcomes = sweep(draws, num_jobs());
  for (size_t i = 0; i < draws.size(); ++i) {
    EXPECT_EQ(outcomes[i].kind, Kind::kExact) << draws[i].text() << "\n" << outcomes[i].why;
  }
}

int run_one(uint64_t seed, bool bare) {
  const Draw one = draws_of(seed, seed + 1, bare).front();
  std::printf("%s\n", one.text().c_str());
  const Outcome outcome = run(one);
  std::fputs(report_line(outcome).c_str(), stdout);
  return outcome.kind == Kind::kBroken ? 1 : 0;
}

int run_many(const std::string& range, bool bare) {
  const size_t colon = range.find(':');
  if (colon == std::string::npos) {
    std::fprintf(stderr, "--draws takes a range, as in 0:400\n");
    return 2;
  }
  const std::vector<Draw> draws =
      draws_of(std::stoull(range), std::stoull(range.substr(colon + 1)), bare);
  const std::vector<Outcome> outcomes = sweep(draws, num_jobs());
  const std::vector<std::string> all = complaints(draws, outcomes);
  for (const std::string& complaint : all) std::printf("%s\n", complaint.c_str());
  std::fputs(summarize(outcomes).text().c_str(), stdout);
  return all.empty() ? 0 : 1;
}

}  // namespace
}  // namespace penstock::tables

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const auto is = [&](int i, const char* option) { return std::strcmp(argv[i], option) == 0; };
  const bool bare = argc > 1 && is(argc - 1, "--bare");
  if (argc > 2 && is(1, "--draw")) return penstock::tables::run_one(std::stoull(argv[2]), bare);
  if (argc > 2 && is(1, "--draws")) return penstock::tables::run_many(argv[2], bare);
  return RUN_ALL_TESTS();
}
