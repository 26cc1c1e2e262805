#include "src/plan/cost/simulator.h"

#include <gtest/gtest.h>

#include "src/base/text.h"
#include "src/plan/passes.h"
#include "src/plan/planner.h"

namespace penstock::simulator_test {
namespace {

const Mesh kMesh = Mesh::of({{Axis::kNode, 2}, {Axis::kLocal, 2}});

// 1024 and 2048 parameters.
ModelDesc two_blocks(Dtype dtype) {
  ModelDesc model;
  model.units = {{.name = "small", .flats = {{1024, dtype}}},
                 {.name = "large", .flats = {{2048, dtype}}}};
  assume_order(model, false);
  return model;
}

std::string peak_text(const MemoryPeak& peak) {
  return concat("param ", peak.param, " grad ", peak.grad, " optim ", peak.optim, " buffers ",
                peak.buffers, " total ", peak.total);
}

std::string sent_text(const Ledger& ledger) {
  std::string out;
  for (const auto& [phase, links] : ledger.sent)
    for (const auto& [link, bytes] : links) out += concat(phase, " ", link, " ", bytes, "; ");
  return out;
}

struct LedgerCase {
  const char* name;
  const char* strategy;
  TableOptions options;
  int num_micro;
  const char *device, *host, *disk, *sent;
};

constexpr const char* kNothing = "param 0 grad 0 optim 0 buffers 0 total 0";

// Computed by hand for 4 ranks: the large unit's full parameters are 4096 bytes in bf16, the small
// one's 2048.
const LedgerCase kCases[] = {
    // Peak when the large unit's gradient is reduced (and again at the small one's backward):
    // 1536 resting + 4096 gathered; 4096 partial + 1024 reduced; 3/4 of 4096 received.
    {"zero3",
     "zero3",
     {.precision = Dtype::kBf16},
     1,
     "param 5632 grad 7168 optim 9216 buffers 3072 total 23040",
     kNothing,
     kNothing,
     "backward local 3072; backward node 6144; forward local 1536; forward node 3072; "},
    // fp32: the parameter is the master copy.
    {"zero3_fp32",
     "zero3",
     {},
     1,
     "param 11264 grad 14336 optim 6144 buffers 6144 total 33792",
     kNothing,
     kNothing,
     "backward local 6144; backward node 12288; forward local 3072; forward node 6144; "},
    // Both partial sums stay in fp32 until the last backward.
    {"zero1_accumulate",
     "zero1",
     {.precision = Dtype::kBf16, .accumulate = true},
     2,
     "param 6144 grad 14336 optim 9216 buffers 6144 total 35840",
     kNothing,
     kNothing,
     "backward local 3072; backward node 6144; update local 1536; update node 3072; "},
    {"ddp",
     "ddp",
     {.precision = Dtype::kBf16},
     1,
     "param 6144 grad 6144 optim 36864 buffers 3072 total 52224",
     kNothing,
     kNothing,
     "backward local 3072; backward node 6144; "},
    // Each node holds a copy. Sums cross nodes in halves (4096 bytes of fp32 for the large unit, of
    // which 2048 are received); parameters never cross nodes.
    {"mics",
     "mics",
     {.precision = Dtype::kBf16},
     1,
     "param 7168 grad 8192 optim 18432 buffers 6144 total 37888",
     kNothing,
     kNothing,
     "backward local 6144; backward node 3072; forward local 3072; "},
    // hpz costs the copy inside the node (1024 bytes for the small unit, 2048 for the large one).
    {"hpz",
     "hpz",
     {.precision = Dtype::kBf16},
     1,
     "param 8704 grad 7168 optim 9216 buffers 3072 total 24064",
     kNothing,
     kNothing,
     "backward local 4608; backward node 3072; forward local 1536; forward node 3072; "},
    // While one unit's optimizer state is written to disk, that of the next unit is in memory.
    {"zero3_optim_disk",
     "zero3",
     {.precision = Dtype::kBf16, .optim_tier = Tier::kDisk},
     1,
     "param 5632 grad 6144 optim 0 buffers 3072 total 12800",
     "param 0 grad 1536 optim 9216 buffers 0 total 10240",
     "param 0 grad 0 optim 9216 buffers 0 total 9216",
     "backward device-host 1536; backward local 3072; backward node 6144; forward local 1536; "
     "forward node 3072; update device-host 1536; update host-disk 18432; "},
    // One gradient is made on the host while the previous one is written, and one is read.
    {"zero3_grad_disk",
     "zero3",
     {.precision = Dtype::kBf16, .optim_tier = Tier::kDisk, .grad_tier = Tier::kDisk},
     1,
     "param 5632 grad 6144 optim 0 buffers 3072 total 12800",
     "param 0 grad 1536 optim 9216 buffers 0 total 10240",
     "param 0 grad 1536 optim 9216 buffers 0 total 10752",
     "backward device-host 1536; backward host-disk 1536; backward local 3072; "
     "backward node 6144; forward local 1536; forward node 3072; update device-host 1536; "
     "update host-disk 19968; "},
    // Two bf16 moments: 8 bytes of state per parameter instead of 12.
    {"zero3_optim_disk_bf16_moments",
     "zero3",
     {.precision = Dtype::kBf16, .optim_tier = Tier::kDisk, .moments = Dtype::kBf16},
     1,
     "param 5632 grad 6144 optim 0 buffers 3072 total 12800",
     "param 0 grad 1536 optim 6144 buffers 0 total 7168",
     "param 0 grad 0 optim 6144 buffers 0 total 6144",
     "backward device-host 1536; backward local 3072; backward node 6144; forward local 1536; "
     "forward node 3072; update device-host 1536; update host-disk 12288; "},
    {"zero3_param_host",
     "zero3",
     {.precision = Dtype::kBf16, .param_tier = Tier::kHost},
     1,
     "param 4096 grad 7168 optim 9216 buffers 3072 total 21504",
     "param 1536 grad 0 optim 0 buffers 0 total 1536",
     kNothing,
     "backward device-host 1536; backward local 3072; backward node 6144; "
     "forward device-host 1536; forward local 1536; forward node 3072; update device-host 1536; "},
};

TEST(SimulatorTest, LedgersByHand) {
  for (const LedgerCase& c : kCases) {
    const ModelDesc model = two_blocks(c.options.precision);
    const Table table = preset(c.strategy, c.options);
    const Plan plan = plan_step(table, model, kMesh, c.num_micro);
    const Ledger ledger = simulate(plan, table, model, kMesh);
    EXPECT_EQ(peak_text(ledger.tier[0]), c.device) << c.name;
    EXPECT_EQ(peak_text(ledger.tier[1]), c.host) << c.name;
    EXPECT_EQ(peak_text(ledger.tier[2]), c.disk) << c.name;
    EXPECT_EQ(sent_text(ledger), c.sent) << c.name;
  }
}

TEST(SimulatorTest, FrozenAndMixedFlatsCountAsTheyAre) {
  ModelDesc model;
  model.units = {
      {.name = "mixed",
       .flats = {{1024, Dtype::kBf16}, {512, Dtype::kFp32}, {2048, Dtype::kBf16, false}}}};
  assume_order(model, false);
  const Mesh mesh = Mesh::of({{Axis::kLocal, 2}});
  const Table table = preset("zero3", {.precision = Dtype::kBf16});
  const Ledger ledger = simulate(plan_step(table, model, mesh, 1), table, model, mesh);
  const int64_t full = 1024 * 2 + 512 * 4 + 2048 * 2;
  const int64_t trained = 1024 * 2 + 512 * 4;
  EXPECT_EQ(ledger.tier[0].param, full / 2 + full);
  EXPECT_EQ(ledger.tier[0].grad, trained + trained / 2);
  EXPECT_EQ(ledger.tier[0].optim, 512 * 12 + 256 * 8);
  EXPECT_EQ(ledger.sent.at("forward").at("local"), full / 2);
  EXPECT_EQ(ledger.sent.at("backward").at("local"), full / 2 + trained / 2);
}

// Quantized values on disk are read to host memory and decoded to the device. Values that are not
// quantized are read straight to the device, which is host memory, too.
TEST(SimulatorTest, QuantizedAndKeptUnitsByHand) {
  ModelDesc model;
  model.units = {{.name = "first", .flats = {{1024, Dtype::kBf16, false}}},
                 {.name = "second", .flats = {{16384, Dtype::kBf16, false}}}};
  model.units[1].flats[0].quantized = true;
  assume_order(model, false);
  Table table = preset("zero3", {.param_tier = Tier::kDisk});
  const auto ledger = [&] {
    return simulate(plan_section(table, model, Mesh(), Section::kEval), table, model, Mesh());
  };
  Placement rest = table.at(Role::kParam, Phase::kRest);
  EXPECT_EQ(ledger().tier[0].param, 32768);
  EXPECT_EQ(ledger().tier[1].param, 32768);  // the search for edits
  rest.dtype = Dtype::kInt8;
  table.set(Role::kParam, Phase::kRest, rest);
  table.set(Role::kParam, Phase::kHold, rest);
  constexpr int64_t kInt8 = 16384 + 128 * 4;
  EXPECT_EQ(ledger().tier[2].param, 2048 + kInt8);
  EXPECT_EQ(ledger().tier[0].param, 32768);
  EXPECT_EQ(ledger().tier[1].param, kInt8 + 32768);
  EXPECT_EQ(ledger().sent.at("forward").at("host-disk"), 2048 + kInt8);
  model.units[1].kept = true;
  EXPECT_EQ(ledger().tier[0].param, 2048 + 32768);
  EXPECT_EQ(ledger().sent.at("forward").at("host-disk"), 2048);
}

// Each micro-batch makes the exchanges of both passes. A ledger counts them, and says that
// computing waits for them.
TEST(SimulatorTest, LayersSendWhatTheySentInStepOne) {
  ModelDesc model = two_blocks(Dtype::kBf16);
  model.units[0].in_forward = {{MoveKind::kAllReduce, Axis::kTensor, 100},
                               {MoveKind::kAllGather, Axis::kTensor, 30}};
  model.units[1].in_backward = {{MoveKind::kAllToAll, Axis::kSequence, 7}};
  const Table table = preset("ddp", {.precision = Dtype::kBf16});
  const Mesh mesh = Mesh::of({{Axis::kTensor, 2}});
  const Plan plan = plan_step(table, model, mesh, 3);
  const Ledger ledger = simulate(plan, table, model, mesh);
  EXPECT_EQ(ledger.sent.at("forward").at("local"), 3 * 130);
  EXPECT_EQ(ledger.sent.at("backward").at("local"), 3 * 7);
  EXPECT_EQ(ledger.waited, ledger.sent);
  std::vector<int64_t> by_line;
  const LineBytes all = bytes_by_line(plan, table, model, mesh);
  for (const auto& line : all) {
    if (line.contains("local")) by_line.push_back(line.at("local"));
  }
  EXPECT_EQ(by_line, (std::vector<int64_t>{100, 30, 7, 100, 30, 7, 100, 30, 7}));
}

// On one rank with fp32 parameters and Adam, 36,864 bytes rest. The forward of the large unit takes
// the most tensors: 1,000 that the small unit keeps, and 20,000 for a moment.
TEST(SimulatorTest, TensorsOfTheModelComeOnTop) {
  ModelDesc model = two_blocks(Dtype::kFp32);
  model.units[0].tensors = {.forward_begin = {200, 0},
                            .forward_end = {5000, 1000},
                            .backward_begin = {},
                            .backward_end = {300, -1000}};
  model.units[1].tensors = {.forward_begin = {},
                            .forward_end = {20000, 2000},
                            .backward_begin = {7000, 500},
                            .backward_end = {100, -2400}};
  const Table table = preset("ddp", {.accumulate = true});
  for (const int num_micro : {1, 2}) {
    const Plan plan = plan_step(table, model, {}, num_micro);
    const Ledger ledger = simulate(plan, table, model, {});
    // The 100 bytes that the user keeps of a micro-batch are there in the next one.
    const int64_t kept = 100 * (num_micro - 1);
    EXPECT_EQ(ledger.tensors.own, 21000 + kept);
    EXPECT_EQ(ledger.tier[0].total, 36864 + 12288) << "without these tensors";
    // In the second forward, the gradients of the first micro-batch are there, too.
    EXPECT_EQ(ledger.tensors.device, 36864 + 21000 + kept + (num_micro - 1) * 12288);
    EXPECT_EQ(ledger.tensors.in_memory, ledger.tensors.device);
  }
  // A unit that runs twice in a pass has the sums of both visits, which count once.
  model.forward.push_back({1, Mark::kWhole});
  model.backward.push_back({1, Mark::kWhole});
  const Ledger twice = simulate(plan_step(table, model, {}, 1), table, model, {});
  EXPECT_EQ(twice.tensors.own, 21000);
  model.units[0].tensors = model.units[1].tensors = {};
  const Ledger unknown = simulate(plan_step(table, model, {}, 1), table, model, {});
  EXPECT_EQ(unknown.tensors.own, 0);
}

TEST(SimulatorTest, OneRankSendsNothing) {
  for (const std::string& name : preset_names()) {
    const Table table = preset(name, {.precision = Dtype::kBf16});
    const ModelDesc model = two_blocks(Dtype::kBf16);
    const Ledger ledger = simulate(plan_step(table, model, {}, 1), table, model, {});
    for (const auto& [phase, links] : ledger.sent) {
      for (const auto& [link, bytes] : links) EXPECT_EQ(link, "device-host") << name << phase;
    }
    const bool on_host = table.at(Role::kParam, Phase::kRest).tier == Tier::kHost;
    EXPECT_EQ(ledger.sent.empty(), !on_host) << name;
    EXPECT_EQ(ledger.tier[on_host ? 1 : 0].param, 3072 * 2) << name;
    EXPECT_EQ(ledger.tier[0].optim, 3072 * 12) << name;
  }
}

TEST(SimulatorTest, AnyOptimizerCounts) {
  const Table table = preset("zero3", {.precision = Dtype::kBf16});
  const ModelDesc model = two_blocks(Dtype::kBf16);
  const Plan plan = plan_step(table, model, kMesh, 1);
  EXPECT_EQ(simulate(plan, table, model, kMesh, {.moments_per_param = 0}).tier[0].optim, 768 * 4);
  EXPECT_EQ(simulate(plan, table, model, kMesh, {.moments_per_param = 1}).tier[0].optim, 768 * 8);
}

// Three chunks are in memory: one is read, a second is updated and a third is written.
TEST(SimulatorTest, ChunksBoundWhatStreamsFromDisk) {
  const Table table = preset("zero3", {.precision = Dtype::kBf16,
                                       .accumulate = true,
                                       .optim_tier = Tier::kDisk,
                                       .param_tier = Tier::kDisk,
                                       .grad_tier = Tier::kDisk});
  constexpr int64_t kChunk = 4 * kChunkGrain;
  ModelDesc model;
  model.units = {{.name = "block", .flats = {{kMesh.world() * 10 * kChunk, Dtype::kBf16}}}};
  assume_order(model, false);
  const auto host = [&](int num_chunks) {
    model.units[0].num_chunks = num_chunks;
    const Ledger ledger = simulate(read_ahead(plan_section(table, model, kMesh, Section::kUpdate)),
                                   table, model, kMesh);
    EXPECT_EQ(ledger.sent.at("update").at("host-disk"), 10 * kChunk * (12 + 4 + 12 + 2));
    return ledger.tier[static_cast<size_t>(Tier::kHost)];
  };
  EXPECT_EQ(host(1).total,
            10 * kChunk * (12 + 4));  // the gradient is freed before the parameter is made
  EXPECT_EQ(host(10).optim, 3 * kChunk * 12);
  EXPECT_EQ(host(10).grad, 2 * kChunk * 4);
  EXPECT_EQ(host(10).param, kChunk * 2);
}

// A section can be simulated alone: after a window that ended early it starts with gradients in
// `hold`.
TEST(SimulatorTest, TheEarlyUpdateStartsWithHeldGradients) {
  const Table table = preset("zero1", {.precision = Dtype::kBf16, .accumulate = true});
  const ModelDesc model = two_blocks(Dtype::kBf16);
  const Ledger ledger =
      simulate(plan_section(table, model, kMesh, Section::kUpdateEarly), table, model, kMesh);
  EXPECT_EQ(ledger.sent.at("update").at("node"), 3072 + 6144);
}

TEST(SimulatorTest, FusingSendsTheSameBytes) {
  const Table table = preset("zero3", {.precision = Dtype::kBf16});
  const ModelDesc model = two_blocks(Dtype::kBf16);
  const Plan plan = plan_step(table, model, kMesh, 1);
  const Plan fused = fuse(plan, model, 1 << 20);
  ASSERT_NE(plan, fused);
  EXPECT_EQ(sent_text(simulate(fused, table, model, kMesh)),
            sent_text(simulate(plan, table, model, kMesh)));
}

// Two units: one gather each in forward and in backward, one reduction each, the norm, one publish
// each. An all_reduce counts as two.
TEST(SimulatorTest, ExchangesByHand) {
  struct ExchangeCase {
    const char* strategy;
    int64_t alone, fused;
  };
  const ModelDesc model = two_blocks(Dtype::kBf16);
  for (const ExchangeCase& c :
       {ExchangeCase{"ddp", 5, 3}, {"zero1", 5, 3}, {"zero2", 5, 3}, {"zero3", 7, 4}}) {
    const Table table = preset(c.strategy, {.precision = Dtype::kBf16});
    const Plan plan = plan_step(table, model, kMesh, 1);
    EXPECT_EQ(simulate(plan, table, model, kMesh).exchanges, c.alone) << c.strategy;
    const Plan fused = fuse(prefetch(plan, model, 1 << 20), model, 1 << 20);
    EXPECT_EQ(simulate(fused, table, model, kMesh).exchanges, c.fused) << c.strategy;
  }
  const Table table = preset("zero3", {.precision = Dtype::kBf16});
  const Mesh alone = Mesh::of({});
  EXPECT_EQ(simulate(plan_step(table, model, alone, 1), table, model, alone).exchanges, 0);
}

// Small shards of one collective are packed: one piece is sent to each peer and one is received
// from it, in addition to the receive buffers.
TEST(SimulatorTest, PackedBuffersByHand) {
  const Table table = preset("zero2", {.precision = Dtype::kBf16});
  const ModelDesc model = two_blocks(Dtype::kBf16);
  const Plan plan = plan_step(table, model, kMesh, 1);
  const int64_t alone = simulate(plan, table, model, kMesh).tier[0].buffers;
  const int64_t fused = simulate(fuse(plan, model, 1 << 20), table, model, kMesh).tier[0].buffers;
  EXPECT_EQ(alone, 3072);
  int64_t shards = 0;
  for (const UnitDesc& unit : model.units) shards += unit.flats[0].numel * 2 / kMesh.world();
  EXPECT_EQ(fused, 3 * (kMesh.world() - 1) * shards);
}

TEST(SimulatorTest, TextNamesTiersAndLinks) {
  const Table table = preset("zero3", {.precision = Dtype::kBf16});
  const ModelDesc model = two_blocks(Dtype::kBf16);
  const std::string text = simulate(plan_step(table, model, kMesh, 1), table, model, kMesh).text();
  EXPECT_NE(text.find("device total 22.50 KiB (param 5.50 KiB, grad 7.00 KiB, optim 9.00 KiB, "
                      "buffers 3.00 KiB)\n"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("sent in forward over node 3.00 KiB\n"), std::string::npos) << text;
}

// The peaks of a step after the first: the last chunk of the update is still being written during
// forward, and a late update continues there.
TEST(SimulatorTest, TheNextForwardRunsBesideTheEndOfTheUpdate) {
  const Table table = preset("zero3", {.optim_tier = Tier::kDisk}).on(kMesh);
  ModelDesc model;
  model.units = {{.name = "root", .flats = {}}, {.name = "block", .flats = {{1024}}}};
  assume_order(model, true);
  const Plan plan = plan_step(table, model, kMesh, 1);
  const int64_t shard = 1024 / kMesh.data(),
                state = shard * 8;  // fp32: the parameter is the master
  const Ledger steady = simulate(plan, table, model, kMesh);
  const Ledger late = simulate(plan, table, model, kMesh, {.late_update = true});
  const auto& host = [](const Ledger& one) { return one.tier[static_cast<size_t>(Tier::kHost)]; };
  EXPECT_GE(host(steady).total, state + shard * 4);  // the state and the gradient in the update
  EXPECT_GE(late.in_memory, steady.in_memory);
  EXPECT_EQ(late.exchanges, steady.exchanges);
  EXPECT_EQ(late.sent, steady.sent);
}

}  // namespace
}  // namespace penstock::simulator_test
