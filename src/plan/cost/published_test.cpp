// Simulates published runs: cuts a GPT of the published shape in the published way, plans it with
// plan_pipeline() and replays the plans. docs/parallel.md lists the assumptions and has the table.
// If a row of this table differs, the test prints the new row.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <ostream>
#include <sstream>

#include "src/base/text.h"
#include "src/plan/cost/pipeline_timeline.h"
#include "src/plan/pipeline_plan.h"

namespace penstock::published_test {
namespace {

constexpr double kHalf = 2;  // bytes

// Data-sheet rates in one direction; `node` is a device's share of its node's links. `matmul`, the
// fraction of the peak within matrix multiplies, is the only fitted number. It is fitted to the
// device's run on one tensor rank and one stage, so that run is not a comparison.
struct Device {
  double peak, matmul, memory, local, node;
};
constexpr Device kA100 = {312e12, 0.678, 2.039e12, 300e9, 25e9};
// DGX-2H, with 100 GB/s between nodes, and DGX-2: 16 devices share a node's links.
constexpr Device kV100H = {130e12, 0.393, 900e9, 150e9, 6.25e9};
constexpr Device kV100 = {125e12, kV100H.matmul, 900e9, 150e9, 6.25e9};

struct Case {
  const char* name;
  const Device& device;
  int layers, hidden, heads, sequence;
  int tensor, pipeline, node, local;  // ranks
  int micro_size, num_micro, virtual_stages;
  double published;  // FLOP/s per device / 1e12
  bool fitted = false;
  int vocabulary = 51200;

  friend void PrintTo(const Case& run, std::ostream* out) { *out << run.name; }
  double tokens() const { return static_cast<double>(micro_size) * sequence; }
  int data() const { return node * local; }
  int ranks() const { return data() * tensor * pipeline; }
  // FLOPs of a step as published, including recomputation (arXiv:2104.04473, equation 3).
  double flops() const {
    const double h = hidden, l = layers, s = sequence, v = vocabulary;
    return 96 * tokens() * num_micro * data() * l * h * h * (1 + s / (6 * h) + v / (16 * l * h));
  }
};

// A100: arXiv:2104.04473, table 1; micro-batches and virtual stages from its authors' scripts
// (Megatron-LM, examples/sc21/run_table_1.sh). V100: arXiv:1909.08053, section 5.1 (8-way: 77% of
// the 1-way rate), and "DeepSpeed: Extreme-scale model training for everyone", 2020.
const Case kCases[] = {
    {"GPT 1.7B, 32 A100", kA100, 24, 2304, 24, 2048, 1, 1, 4, 8, 16, 1, 1, 137, true},
    {"GPT 3.6B, 64 A100", kA100, 30, 3072, 32, 2048, 2, 1, 8, 4, 16, 1, 1, 138},
    {"GPT 7.5B, 128 A100", kA100, 36, 4096, 32, 2048, 4, 1, 16, 2, 16, 1, 1, 142},
    {"GPT 18B, 256 A100", kA100, 40, 6144, 48, 2048, 8, 1, 32, 1, 8, 4, 1, 135},
    {"GPT 39B, 512 A100", kA100, 48, 8192, 64, 2048, 8, 2, 32, 1, 4, 12, 1, 138},
    {"GPT 76B, 1,024 A100", kA100, 60, 10240, 80, 2048, 8, 4, 32, 1, 2, 28, 3, 140},
    {"GPT 145B, 1,536 A100", kA100, 80, 12288, 96, 2048, 8, 8, 24, 1, 2, 48, 2, 148},
    {"GPT 310B, 1,920 A100", kA100, 96, 16384, 128, 2048, 8, 16, 15, 1, 1, 144, 2, 155},
    {"GPT 530B, 2,520 A100", kA100, 105, 20480, 128, 2048, 8, 35, 9, 1, 1, 280, 3, 163},
    {"GPT 1T, 3,072 A100", kA100, 128, 25600, 160, 2048, 8, 64, 6, 1, 1, 512, 1, 163},
    {"GPT 1.2B, 1 V100", kV100H, 40, 1536, 16, 1024, 1, 1, 1, 1, 8, 1, 1, 39, true},
    {"GPT 8.3B, 8 V100", kV100H, 72, 3072, 32, 1024, 8, 1, 1, 1, 8, 1, 1, 0.77 * 39},
    {"GPT 1T, 800 V100", kV100, 298, 17408, 128, 2048, 16, 50, 1, 1, 1, 2048, 1, 47},
};

// Work of a layer per token and tensor rank: `h` values of the hidden size, `c` values of a tensor
// rank's part of that size, `a` attention scores. Every kernel reads its inputs and writes its
// outputs once. A value has 2 bytes, an element of a dropout mask 1 byte. Biases, GeLU, dropout and
// residual are fused, and so are scale, mask and softmax (arXiv:2104.04473, section 4.2).
struct Layer {
  double h, c, a;          // values
  double tokens, weights;  // of one tensor rank, in units of h * h

  explicit Layer(const Case& run)
      : h(run.hidden),
        c(h / run.tensor),
        a(static_cast<double>(run.heads) * run.sequence / run.tensor),
        tokens(run.tokens()),
        weights(h * c) {}

  // Returns the work of multiplying by `squares` weight matrices of h * h each, and of reading and
  // writing all operands. A backward has twice as much of both.
  UnitWork::ComputePass matmul(double squares, double values) const {
    return {2 * squares * weights * tokens, kHalf * (squares * weights + values * tokens)};
  }
  static void add(UnitWork& work, const UnitWork::ComputePass& pass) {
    work.forward.flops += pass.flops;
    work.forward.memory_bytes += pass.memory_bytes;
    work.backward.flops += 2 * pass.flops;
    work.backward.memory_bytes += 2 * pass.memory_bytes;
  }

  // Returns the work of two layer norms, of queries, keys and values, of the first matrix of the
  // MLP, and of GeLU.
  UnitWork columns() const {
    UnitWork work;
    add(work, matmul(3, h + 3 * c));
    add(work, matmul(4, h + 4 * c));
    work.forward.memory_bytes += tokens * (2 * 4 * h + 16 * c);
    // For norms and their residuals, GeLU, biases, and the concatenation of the three gradients.
    work.backward.memory_bytes += tokens * (2 * (6 + 6) * h + (24 + 8 + 6 + 12) * c);
    return work;
  }
  // Returns the work of scores, softmax, dropout, values and their transpose, and of two
  // multiplications, each with dropout and residual.
  UnitWork rows(double sequence) const {
    UnitWork work;
    add(work, {2 * 2 * sequence * c * tokens, kHalf * 2 * (2 * c + a) * tokens});
    add(work, matmul(1, c + h));
    add(work, matmul(4, 4 * c + h));
    work.forward.memory_bytes += tokens * ((4 + 5) * a + 4 * c + 2 * 7 * h);
    work.backward.memory_bytes += tokens * ((6 + 5) * a + 4 * c + 2 * 7 * h);
    return work;
  }
};

UnitWork times(UnitWork work, int layers) {
  for (UnitWork::ComputePass* const pass : {&work.forward, &work.backward}) {
    pass->flops *= layers;
    pass->memory_bytes *= layers;
  }
  return work;
}

struct Gpt {
  ModelDesc model;
  std::vector<UnitWork> work;
  std::vector<int> stages;

  void add(UnitDesc unit, double numel, int stage, const UnitWork& done) {
    unit.flats = {{static_cast<int64_t>(numel), Dtype::kFp16}};
    model.units.push_back(std::move(unit));
    work.push_back(done);
    stages.push_back(stage);
  }
};

// Returns the work of the embedding lookup with positions and dropout. head_of() returns the work
// of the logits and of the loss in fp32.
UnitWork embedding_of(const Case& run) {
  const double bytes = 12.0 * run.hidden * run.tokens();
  return {{0, bytes}, {0, bytes}};
}
UnitWork head_of(const Case& run) {
  const double h = run.hidden, tokens = run.tokens();
  const double vocabulary = static_cast<double>(run.vocabulary) / run.tensor;
  UnitWork work;
  Layer::add(work,
             {2 * h * vocabulary * tokens, kHalf * (h * vocabulary + (h + vocabulary) * tokens)});
  work.forward.memory_bytes += (6 + 4 + 8) * vocabulary * tokens;
  work.backward.memory_bytes += (4 + 4 + 6) * vocabulary * tokens;
  return work;
}

// Without stages a layer is two units, each of which reduces its gradients at once. With stages all
// layers of a stage are one unit, which reduces at its end.
Gpt gpt_of(const Case& run) {
  Gpt gpt;
  const Layer layer(run);
  const int num_stages = run.pipeline * run.virtual_stages;
  const double vocabulary = static_cast<double>(run.vocabulary) / run.tensor;
  // If the layers cannot be divided evenly, the embedding and the head each count as one layer.
  const bool even = run.layers % num_stages == 0;
  const int of_stage = even ? run.layers / num_stages : (run.layers + 2) / num_stages;
  const double values = kHalf * run.hidden * run.tokens();
  const auto sums = [&](double times) {
    const auto bytes = static_cast<int64_t>(2.0 * (run.tensor - 1) / run.tensor * times * values);
    if (run.tensor == 1) return std::vector<LayerExchange>();
    return std::vector<LayerExchange>{{MoveKind::kAllReduce, Axis::kTensor, bytes}};
  };
  gpt.add({.name = "embedding", .flats = {}, .in_forward = sums(1)}, vocabulary * layer.h, 0,
          embedding_of(run));
  for (int stage = 0; stage < num_stages; ++stage) {
    const bool end = stage == 0 || stage + 1 == num_stages;
    const int layers = of_stage - (even || !end ? 0 : 1);
    const int at_once = run.pipeline == 1 ? 1 : layers;
    for (int i = 0; i < layers; i += at_once) {
      const auto two = sums(2.0 * at_once);
      gpt.add({.name = "columns", .flats = {}, .recomputed = true, .in_backward = two},
              at_once * 7 * layer.weights, stage, times(layer.columns(), at_once));
      gpt.add({.name = "rows",
               .flats = {},
               .recomputed = true,
               .in_forward = two,
               .in_backward = two},  // its forward runs again
              at_once * 5 * layer.weights, stage, times(layer.rows(run.sequence), at_once));
    }
  }
  gpt.add({.name = "head", .flats = {}, .in_backward = sums(1)}, vocabulary * layer.h,
          num_stages - 1, head_of(run));
  assume_order(gpt.model, false);
  for (auto* order : {&gpt.model.forward, &gpt.model.backward}) {
    for (Visit& visit : *order) visit.stage = gpt.stages[visit.unit];
  }
  // Each tensor rank sends its part.
  gpt.model.boundary_bytes = static_cast<int64_t>(kHalf * layer.c * layer.tokens);
  return gpt;
}

struct Outcome {
  double seconds = 0, teraflops = 0, bubble = 0;
};

Outcome simulated(const Case& run) {
  const Device& device = run.device;
  Machine machine;
  machine.flops = device.peak * device.matmul;
  machine.local = device.local;
  machine.node = device.node;
  machine.device_memory = device.memory;
  const Mesh mesh = Mesh::of({{Axis::kPipeline, run.pipeline},
                              {Axis::kNode, run.node},
                              {Axis::kLocal, run.local},
                              {Axis::kTensor, run.tensor}});
  const Table table = preset("ddp", {.precision = Dtype::kFp16});
  const Gpt gpt = gpt_of(run);
  const Schedule schedule = make_schedule(run.virtual_stages > 1 ? "interleaved" : "1f1b",
                                          {run.pipeline, run.virtual_stages, run.num_micro});
  const Timeline timeline = replay(plan_pipeline(table, gpt.model, mesh, schedule), table,
                                   gpt.model, mesh, machine, gpt.work);
  Outcome outcome;
  outcome.seconds = timeline.step;
  outcome.teraflops = run.flops() / timeline.step / run.ranks() / 1e12;
  // Measured on the busiest rank, so waits for a slower stage do not count.
  const auto busiest =
      std::max_element(timeline.ranks.begin(), timeline.ranks.end(),
                       [](const auto& a, const auto& b) { return a.busy < b.busy; });
  outcome.bubble = busiest->idle / busiest->busy;
  return outcome;
}

double formula(const Case& run) {
  return (run.pipeline - 1.0) / (run.virtual_stages * run.num_micro);
}

std::string percent(double part, bool sign = false) {
  char text[32];
  std::snprintf(text, sizeof(text), sign ? "%+.1f %%" : "%.1f %%", 100 * part);
  return text;
}

std::string row_of(const Case& run, const Outcome& outcome) {
  const double peak = run.device.peak / 1e12;
  std::string mesh = concat(run.tensor, " x ", run.pipeline, " x ", run.data());
  std::string order = run.virtual_stages > 1 ? concat(", v = ", run.virtual_stages) : "";
  const bool piped = run.pipeline > 1;
  return concat("| ", run.name, " | ", mesh, " | ", run.num_micro, " x ", run.micro_size, order,
                " | ", percent(run.published / peak), " | ", percent(outcome.teraflops / peak),
                " | ", run.fitted ? "fitted" : percent(outcome.teraflops / run.published - 1, true),
                " | ", piped ? percent(formula(run)) : "", " | ",
                piped ? percent(outcome.bubble) : "", " |\n");
}

class Published : public testing::TestWithParam<Case> {};

TEST_P(Published, WithinFifteenPercentAndAsInTheDocs) {
  const Case& run = GetParam();
  const Outcome outcome = simulated(run);
  EXPECT_NEAR(outcome.teraflops / run.published, 1, run.fitted ? 0.005 : 0.15);
  if (run.pipeline > 1) {
    EXPECT_NEAR(outcome.bubble / formula(run), 1, 0.15);
  }
  std::ifstream file(concat(PENSTOCK_SOURCE_DIR, "/docs/parallel.md"));
  std::stringstream page;
  page << file.rdbuf();
  const std::string row = row_of(run, outcome);
  EXPECT_NE(page.str().find(row), std::string::npos) << "docs/parallel.md should have\n" << row;
}
INSTANTIATE_TEST_SUITE_P(Cases, Published, testing::ValuesIn(kCases));

// Compares equation 3 with the sum over operators: two forwards, and a backward with twice the
// FLOPs of a forward.
TEST(PublishedCases, FlopsAreThoseOfTheUnits) {
  for (const Case& run : kCases) {
    const Gpt gpt = gpt_of(run);
    double flops = 0;
    for (size_t unit = 0; unit < gpt.work.size(); ++unit) {
      const UnitWork& work = gpt.work[unit];
      flops +=
          work.forward.flops * (gpt.model.units[unit].recomputed ? 2 : 1) + work.backward.flops;
    }
    EXPECT_NEAR(flops * run.num_micro * run.tensor * run.data() / run.flops(), 1, 1e-9) << run.name;
  }
}

}  // namespace
}  // namespace penstock::published_test
