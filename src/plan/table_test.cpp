#include "src/plan/table.h"

#include <gtest/gtest.h>

#include "penstock/error.h"
#include "src/plan/model_desc.h"
#include "src/plan/route.h"

namespace penstock::table_test {
namespace {

struct PresetCase {
  const char* name;
  TableOptions options;
  const char* text;
};

TEST(TableTest, PresetsHaveTheseCells) {
  const PresetCase cases[] = {
      {"ddp",
       {},
       "param rest=RR@device:fp32 forward=RR@device:fp32 hold=RR@device:fp32 "
       "backward=RR@device:fp32\n"
       "grad backward=PP@device:fp32 hold=PP@device:fp32 update=RR@device:fp32\n"
       "optim rest=RR@device:fp32 update=RR@device:fp32\n"
       "act forward=SS@device:fp32 hold=SS@device:fp32 backward=SS@device:fp32\n"},
      {"zero1",
       {.precision = Dtype::kBf16, .accumulate = true, .optim_tier = Tier::kHost},
       "param rest=RR@device:bf16 forward=RR@device:bf16 hold=RR@device:bf16 "
       "backward=RR@device:bf16\n"
       "grad backward=PP@device:bf16 hold=PP@device:fp32 update=SS@host:fp32\n"
       "optim rest=SS@host:fp32 update=SS@host:fp32\n"
       "act forward=SS@device:bf16 hold=SS@device:bf16 backward=SS@device:bf16\n"},
      {"zero3",
       {.precision = Dtype::kBf16,
        .optim_tier = Tier::kDisk,
        .param_tier = Tier::kHost,
        .act_tier = Tier::kDisk},
       "param rest=SS@host:bf16 forward=RR@device:bf16 hold=SS@host:bf16 "
       "backward=RR@device:bf16\n"
       "grad backward=PP@device:bf16 hold=SS@host:bf16 update=SS@host:bf16\n"
       "optim rest=SS@disk:fp32 update=SS@host:fp32\n"
       "act forward=SS@device:bf16 hold=SS@disk:bf16 backward=SS@device:bf16\n"},
      {"hpz",
       {.precision = Dtype::kFp16},
       "param rest=SS@device:fp16 forward=RR@device:fp16 hold=RS@device:fp16 "
       "backward=RR@device:fp16\n"
       "grad backward=PP@device:fp16 hold=SS@device:fp16 update=SS@device:fp16\n"
       "optim rest=SS@device:fp32 update=SS@device:fp32\n"
       "act forward=SS@device:fp16 hold=SS@device:fp16 backward=SS@device:fp16\n"},
      {"mics",
       {.accumulate = true, .act_tier = Tier::kHost},
       "param rest=RS@device:fp32 forward=RR@device:fp32 hold=RS@device:fp32 "
       "backward=RR@device:fp32\n"
       "grad backward=PP@device:fp32 hold=RS@device:fp32 update=RS@device:fp32\n"
       "optim rest=RS@device:fp32 update=RS@device:fp32\n"
       "act forward=SS@device:fp32 hold=SS@host:fp32 backward=SS@device:fp32\n"},
      {"ddp",
       {.optim_tier = Tier::kDisk, .moments = Dtype::kBf16},
       "param rest=RR@device:fp32 forward=RR@device:fp32 hold=RR@device:fp32 "
       "backward=RR@device:fp32\n"
       "grad backward=PP@device:fp32 hold=PP@device:fp32 update=RR@host:fp32\n"
       "optim rest=RR@disk:bf16 update=RR@host:bf16\n"
       "act forward=SS@device:fp32 hold=SS@device:fp32 backward=SS@device:fp32\n"},
  };
  for (const PresetCase& c : cases) EXPECT_EQ(preset(c.name, c.options).text(), c.text) << c.name;
}

TEST(TableTest, TextParsesBack) {
  for (const std::string& name : preset_names()) {
    const Table table = preset(name, {.precision = Dtype::kBf16, .act_tier = Tier::kDisk});
    EXPECT_EQ(Table::parse(table.text()), table) << name;
  }
  Table table = preset("zero2", {});
  EXPECT_EQ(table.text().find("residual"), std::string::npos);
  table.set(Role::kResidual, Phase::kRest, Placement::parse("PP@host:bf16"));
  EXPECT_NE(table.text().find("residual rest=PP@host:bf16\n"), std::string::npos);
  EXPECT_EQ(Table::parse(table.text()), table);
  EXPECT_EQ(table.text().find("update=SS@host:bf16"), std::string::npos);
  table.set(Role::kParam, Phase::kUpdate, Placement::parse("SS@host:bf16"));
  table.wires.set("publish", "node:int4/64");
  EXPECT_NE(table.text().find(" update=SS@host:bf16\ngrad "), std::string::npos) << table.text();
  EXPECT_NE(table.text().find("wire publish=node:int4/64\n"), std::string::npos) << table.text();
  EXPECT_EQ(Table::parse(table.text()), table);
}

TEST(TableTest, UpdatedParametersArePublishedByDeltas) {
  Table table = preset("zero1", {.precision = Dtype::kBf16});
  const Route plain = route(table.master(), table.publish(), Mesh(), 0);
  EXPECT_TRUE(joins_update(table, plain));
  EXPECT_FALSE(preset("zero1", {}).has_master(Dtype::kFp32));
  const auto moves = [](const Table& one) {
    std::vector<std::string> texts;
    for (const Move& move : one.publish()) texts.push_back(move.text());
    return join(texts, "; ");
  };
  table.set(Role::kParam, Phase::kUpdate, Placement::parse("SS@device:bf16"));
  table.wires.set("publish", "int4/64");
  EXPECT_EQ(moves(table), "cast(bf16); all_gather(data:int4/64/delta)");
  EXPECT_EQ(parse_move("all_gather(data:int4/64/delta)"), table.publish().back());
  EXPECT_TRUE(table.has_master(Dtype::kFp32));
  // An exact step has the masters and the base, too, so its update does not publish either.
  table.wires = {};
  EXPECT_EQ(moves(table), "cast(bf16); all_gather(data)");
  EXPECT_FALSE(joins_update(table, plain));
  for (const char* name : {"param", "grad", "publish"}) {
    EXPECT_THROW(table.wires.set(name, "int4/64/delta"), ConfigError) << name;
  }
}

TEST(TableTest, WhatIsNoTableIsRefusedByItsCell) {
  const std::string text = preset("zero3", {}).text();
  const auto refused = [](const std::string& wrong) -> std::string {
    try {
      Table::parse(wrong);
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(refused(text.substr(text.find('\n') + 1)),
            "[plan::Table::parse] cell param.rest is missing");
  EXPECT_EQ(refused(text + "grad rest=SS@device:fp32"),
            "[plan::Table::parse] there is no cell grad.rest");
  EXPECT_EQ(refused(text + text), "[plan::Table::parse] cell param.rest is given twice");
  EXPECT_EQ(refused(text + "grad rest"), "[plan::Table::parse] there is no cell grad.rest");
  EXPECT_NE(refused("param rest=SS").find("placement 'SS'"), std::string::npos);
}

TEST(TableTest, WrongNamesAndIneffectiveTiersAreErrors) {
  try {
    preset("zero4", {});
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("did you mean 'zero"), std::string::npos);
  }
  for (const char* name : {"ddp", "zero1", "zero2"})
    EXPECT_THROW(preset(name, {.param_tier = Tier::kHost}), ConfigError) << name;
  for (const std::string& name : preset_names()) EXPECT_NO_THROW(preset(name, {})) << name;
}

TEST(TableTest, OneDataRankSeesNoShards) {
  const Table table = preset("zero3", {.optim_tier = Tier::kHost});
  const Table alone = table.on(Mesh::of({{Axis::kTensor, 2}}));
  EXPECT_EQ(alone.at(Role::kGrad, Phase::kHold).text(), "RR@host:fp32");
  EXPECT_EQ(alone.on(Mesh::of({{Axis::kTensor, 2}})), alone);
  EXPECT_EQ(table.on(Mesh::of({{Axis::kLocal, 2}})), table);
}

TEST(TableTest, AFlatKeepsItsOwnDtypeWhereTheTableSaysPrecision) {
  const Table table = preset("zero3", {.precision = Dtype::kBf16, .accumulate = true});
  const Placement& rest = table.at(Role::kParam, Phase::kRest);
  const Placement& sum = table.at(Role::kGrad, Phase::kHold);
  EXPECT_EQ(table.dtype_in(rest, Dtype::kBf16), Dtype::kBf16);
  EXPECT_EQ(table.dtype_in(rest, Dtype::kFp32), Dtype::kFp32);
  EXPECT_EQ(table.dtype_in(sum, Dtype::kBf16), Dtype::kFp32);
}

TEST(TableTest, OnlyHeldPartialSumsNeedNoMove) {
  EXPECT_TRUE(preset("ddp", {}).holds_grad_in_place());
  EXPECT_TRUE(preset("zero1", {}).holds_grad_in_place());
  const Table zero2 = preset("zero2", {.precision = Dtype::kBf16, .accumulate = true});
  EXPECT_FALSE(zero2.holds_grad_in_place());
  EXPECT_EQ(zero2.grad_after_backward().text(), "PP@device:bf16");
  EXPECT_TRUE(zero2.on({}).holds_grad_in_place());
  EXPECT_EQ(zero2.on({}).grad_after_backward().text(), "RR@device:fp32");
}

TEST(ModelDescTest, AssumedOrderEnclosesInTheRoot) {
  ModelDesc model;
  model.units.resize(3);
  assume_order(model, true);
  using Order = std::vector<Visit>;
  const Visit begin{0, Mark::kBegin}, end{0, Mark::kEnd};
  EXPECT_EQ(model.forward, (Order{begin, {1}, {2}, end}));
  EXPECT_EQ(model.backward, (Order{begin, {2}, {1}, end}));
  assume_order(model, false);
  EXPECT_EQ(model.forward, (Order{{0}, {1}, {2}}));
  EXPECT_EQ(model.backward, (Order{{2}, {1}, {0}}));
}

}  // namespace
}  // namespace penstock::table_test
