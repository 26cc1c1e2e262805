#include "src/plan/strategy.h"

#include <gtest/gtest.h>

#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"

namespace penstock::strategy_test {
namespace {

constexpr int64_t kOwned = 100000;  // elements per rank of each large trainable flat
constexpr int kRanks = 2;

ModelDesc model() {
  ModelDesc model;
  model.units = {{.name = "root", .flats = {{kRanks * 10, Dtype::kBf16}}},
                 {.name = "block",
                  .flats = {{kRanks * kOwned, Dtype::kBf16},
                            {kRanks * kOwned, Dtype::kFp32},
                            {kRanks * 300, Dtype::kFp32},
                            {kRanks * 1000000, Dtype::kBf16, false}}}};
  assume_order(model, true);
  return model;
}

Config config(const std::string& offload) {
  Config config = Config::parse(concat(R"({"optimizer": {}, "offload": )", offload, "}"));
  config.resolve(kRanks);
  return config;
}

ModelDesc chunked(const Config& config) {
  ModelDesc one = model();
  set_chunks(config, table_of(config, one).on(mesh_of(config)), one);
  return one;
}

// Bytes per parameter: 12 for master and moments, plus a gradient and a parameter in its dtype.
int64_t streamed(const UnitDesc& unit, int index) {
  int64_t bytes = 0;
  for (const FlatDesc& flat : unit.flats) {
    if (!flat.trainable) continue;
    const auto [begin, end] = range_of({index, unit.num_chunks}, flat.numel / kRanks);
    bytes += (end - begin) * (12 + 2 * dtype_bytes(flat.dtype));
  }
  return bytes;
}

TEST(Strategy, EveryKthBlockIsComputedAgain) {
  ModelDesc some;
  for (const bool block : {false, false, true, true, false, true, false}) {
    some.units.push_back({.name = "u", .flats = {}, .block = block});
  }
  Config every;
  for (const auto& [k, recomputed] :
       {std::pair{0, std::vector<int>{}}, {1, {2, 3, 5}}, {2, {2, 5}}, {3, {2}}}) {
    ModelDesc model = some;
    every.activations.checkpoint = k;
    mark_recomputed(every, model);
    std::vector<int> marked;
    for (int unit = 0; unit < 7; ++unit) {
      if (model.units[unit].recomputed) marked.push_back(unit);
    }
    EXPECT_EQ(marked, recomputed) << k;
  }
  ModelDesc layers = some;
  for (UnitDesc& unit : layers.units) unit.block = false;
  EXPECT_THROW(mark_recomputed(every, layers), ConfigError);
}

TEST(Strategy, ThreeChunksFitTheWindow) {
  const int64_t grain = kChunkGrain * (16 + 20) + 300 * 20;  // both large flats, and the small one
  for (const int64_t window : {3 * grain, 300000L, 1000003L, 3000000L, 100000000L}) {
    const UnitDesc block =
        chunked(config(concat(R"({"optimizer": "disk", "params": "disk", "gradients": "disk",)",
                              R"( "window_bytes": )", window, "}")))
            .units[1];
    for (int index = 0; index < block.num_chunks; ++index) {
      EXPECT_LE(streamed(block, index), window / 3) << window << ", chunk " << index;
    }
    EXPECT_GT(streamed(block, block.num_chunks - 1), 0) << window << ": the last one is empty";
    if (block.num_chunks == 1) continue;
    EXPECT_GT(2 * streamed(block, 0), window / 3) << window << ": smaller than need be";
  }
}

TEST(Strategy, AGrainIsTheLeastAndMemoryIsOneChunk) {
  const std::vector<UnitDesc> least =
      chunked(config(R"({"optimizer": "disk", "window_bytes": 1})")).units;
  EXPECT_EQ(least[0].num_chunks, 1);
  EXPECT_EQ(least[1].num_chunks, (kOwned + kChunkGrain - 1) / kChunkGrain);
  EXPECT_EQ(chunked(config(R"({"optimizer": "host"})")).units[1].num_chunks, 1);
  EXPECT_EQ(chunked(config(R"({"params": "disk"})")).units[1].num_chunks, 1);
}

TEST(Strategy, KeptUnitsAreTheFirstThatFit) {
  ModelDesc some = model();
  some.units.push_back({.name = "last", .flats = {{100, Dtype::kBf16, false}}});
  assume_order(some, true);
  const auto kept = [&](int64_t bytes) {
    Config asked = Config::parse(
        concat(R"({"inference": true, "offload": {"params": "host", "keep_bytes": )", bytes, "}}"));
    ModelDesc one = some;
    set_kept(asked, one);
    std::string units;
    for (const UnitDesc& unit : one.units) units += unit.kept ? '1' : '0';
    return units;
  };
  EXPECT_EQ(kept(0), "000");
  EXPECT_EQ(kept(40), "100");
  EXPECT_EQ(kept(240), "101");  // the block is too large
  EXPECT_EQ(kept(1 << 30), "111");
  EXPECT_EQ(kept(39), "000");
}

TEST(Strategy, AWindowHasTheCodecAndTheLayersOfAllMicroBatches) {
  Config asked = Config::parse(R"({"strategy": "zero3", "comm": {"codec": "int8"}})");
  asked.batch.accumulate = 7;
  asked.resolve(kRanks);
  ModelDesc one = model();
  one.units[0].in_forward = {{MoveKind::kAllReduce, Axis::kTensor, 100}};
  const Ledger walked = predict(asked, one), window = predict_window(asked, one);
  EXPECT_FALSE(walked.coded.empty());
  EXPECT_EQ(window.coded, walked.coded);
  EXPECT_EQ(walked.waited.at("forward").at("local"), 700);
  EXPECT_EQ(window.waited, walked.waited);
  EXPECT_EQ(window.sent, walked.sent);
}

TEST(Strategy, AWindowIsAsIfEachOfItsMicroBatchesWerePlanned) {
  for (const char* strategy : {"ddp", "zero1", "zero2", "zero3"}) {
    for (const char* optimizer : {"none", "host", "disk"}) {
      for (const char* params : {"none", "host", "disk"}) {
        if (strategy != std::string("zero3") && params != std::string("none")) continue;
        Config asked =
            Config::parse(concat(R"({"strategy": ")", strategy, R"(", "offload": {"optimizer": ")",
                                 optimizer, R"(", "params": ")", params, R"("}})"));
        asked.batch.accumulate = 7;
        asked.resolve(kRanks);
        const Ledger walked = predict(asked, model()), window = predict_window(asked, model());
        EXPECT_EQ(window.text(), walked.text()) << strategy << " " << optimizer << " " << params;
        EXPECT_EQ(window.sent, walked.sent) << strategy << " " << optimizer << " " << params;
        EXPECT_EQ(window.exchanges, walked.exchanges);
      }
    }
  }
}

}  // namespace
}  // namespace penstock::strategy_test
