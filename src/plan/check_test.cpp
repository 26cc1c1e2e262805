// Every principle refuses tables that violate it and names the cell. docs/tables.md lists every
// principle.
#include "src/plan/check.h"

#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "penstock/error.h"
#include "src/base/text.h"

namespace penstock::check_test {
namespace {

const Mesh kMesh = Mesh::of({{Axis::kNode, 2}, {Axis::kLocal, 2}});

ModelDesc model() {
  ModelDesc model;
  model.units = {{.name = "root", .flats = {{8192, Dtype::kBf16}, {512, Dtype::kFp32}}}};
  return model;
}

std::string refusal(const Table& table, const Conditions& conditions = {}) {
  try {
    check(table, model(), kMesh, conditions);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

Table zero3() { return preset("zero3", {.precision = Dtype::kBf16}); }

Table with(Role role, Phase phase, const char* place) {
  Table table = zero3();
  table.set(role, phase, Placement::parse(place));
  return table;
}

TEST(CheckTest, PresetsAreFine) {
  for (const std::string& name : preset_names())
    EXPECT_EQ(refusal(preset(name, {.precision = Dtype::kBf16})), "") << name;
}

TEST(CheckTest, CellsThatRun) {
  EXPECT_EQ(refusal(with(Role::kParam, Phase::kRest, "SR@host:fp32")), "");
  EXPECT_EQ(refusal(with(Role::kParam, Phase::kHold, "RR@disk:bf16")), "");
  EXPECT_EQ(refusal(with(Role::kGrad, Phase::kHold, "PS@host:fp32")), "");
  EXPECT_EQ(refusal(with(Role::kOptim, Phase::kRest, "RR@disk:fp32")), "");
  EXPECT_EQ(refusal(with(Role::kGrad, Phase::kHold, "PP@device:fp32")), "");
  Table table = with(Role::kGrad, Phase::kUpdate, "RS@device:bf16");  // as the optimizer state
  table.set(Role::kOptim, Phase::kUpdate, Placement::parse("RS@device:fp32"));
  EXPECT_EQ(refusal(table), "");
}

struct Refused {
  Role role;
  Phase phase;
  const char *place, *says;
};

TEST(CheckTest, RefusalsNameTheCellItsValueAndThePrinciple) {
  const Refused cases[] = {
      {Role::kParam, Phase::kForward, "SS@device:bf16", "compute"},
      {Role::kParam, Phase::kBackward, "RR@host:bf16", "compute"},
      {Role::kParam, Phase::kForward, "RR@device:fp32", "compute"},
      {Role::kGrad, Phase::kBackward, "RR@device:bf16", "compute"},
      {Role::kOptim, Phase::kUpdate, "SS@disk:fp32", "compute"},
      {Role::kParam, Phase::kForward, "RS@device:bf16", "compute"},
      {Role::kParam, Phase::kBackward, "RR@disk:bf16", "compute"},
      {Role::kParam, Phase::kRest, "PS@device:bf16", "sum"},
      {Role::kOptim, Phase::kRest, "SP@device:fp32", "sum"},
      {Role::kGrad, Phase::kUpdate, "SP@device:bf16", "sum"},
      {Role::kGrad, Phase::kHold, "SS@device:fp16", "precision"},
      {Role::kParam, Phase::kRest, "RR@device:fp16", "precision"},
      {Role::kOptim, Phase::kRest, "SS@device:bf16", "moments"},
      {Role::kGrad, Phase::kUpdate, "RR@device:bf16", "together"},
      {Role::kGrad, Phase::kUpdate, "SS@host:bf16", "together"},
  };
  for (const Refused& one : cases) {
    EXPECT_TRUE(refusal(with(one.role, one.phase, one.place))
                    .starts_with(concat("[plan::check] table.", role_name(one.role), ".",
                                        phase_name(one.phase), " is \"", one.place,
                                        "\": ", one.says, ": ")))
        << refusal(with(one.role, one.phase, one.place));
  }
}

Table with_residual(Table table, const char* wires, const char* rest) {
  table.wires.set("grad", wires);
  table.set(Role::kResidual, Phase::kRest, Placement::parse(rest));
  return table;
}

TEST(CheckTest, AResidualHasTheLayoutOfTheAddendsOfTheSumThatRounds) {
  EXPECT_EQ(refusal(with_residual(zero3(), "int4/128/nearest", "PP@host:bf16")), "");
  EXPECT_EQ(refusal(with_residual(zero3(), "local:int4", "PP@device:fp32")), "");
  EXPECT_EQ(refusal(with_residual(zero3(), "node:int4", "PS@device:fp32")), "");
  const Table held = with(Role::kGrad, Phase::kHold, "PS@device:fp32");
  EXPECT_EQ(refusal(with_residual(held, "node:int4", "PS@device:fp32")), "");
  struct Case {
    Table table;
    const char* says;
  };
  const Case cases[] = {
      {with_residual(zero3(), "plain", "PP@device:fp32"), "no sum of gradients rounds anything"},
      {with_residual(zero3(), "int4", "PS@device:fp32"), "it can only be \"PP@device:fp32\""},
      {with_residual(held, "int4", "PS@device:fp32"), "rounded twice"},
      {with_residual(with(Role::kGrad, Phase::kHold, "SP@device:fp32"), "local:int4",
                     "SP@device:fp32"),
       "gradients are gathered before"},
      {with_residual(zero3(), "node:int4", "PP@device:fp32"), "it can only be \"PS@device:fp32\""},
      {with_residual(preset("ddp", {.precision = Dtype::kBf16}), "int4", "PP@device:fp32"),
       "rounded twice"},
      {with_residual(zero3(), "int4", "PP@disk:fp32"), "the tier can be device or host"},
      {with_residual(zero3(), "int4", "PP@host:fp16"), "with a residual in bf16 or fp32"},
  };
  for (const Case& one : cases) {
    EXPECT_NE(refusal(one.table).find("residual: "), std::string::npos) << refusal(one.table);
    EXPECT_NE(refusal(one.table).find(one.says), std::string::npos) << refusal(one.table);
  }
}

TEST(CheckTest, SignsAreForGradientsOfOptimizersThatCanUseThem) {
  const Table table = with_residual(zero3(), "sign", "PP@host:bf16");
  EXPECT_EQ(refusal(table, {.optimizer = OptimizerType::kLion}), "");
  EXPECT_EQ(refusal(table, {.optimizer = OptimizerType::kSgd}), "");
  EXPECT_EQ(refusal(table, {.optimizer = OptimizerType::kAdamW, .begins_exact = true}), "");
  const auto says = [&](const Conditions& conditions, const char* text) {
    EXPECT_NE(refusal(table, conditions).find(text), std::string::npos)
        << refusal(table, conditions);
  };
  says({.optimizer = OptimizerType::kAdam}, "set comm.exact_first to at least 1");
  says({.optimizer = OptimizerType::kAdagrad}, "use AdamW, Adam, SGD or Lion");
  says({.own_optimizer = true}, "use AdamW, Adam, SGD or Lion");
  Table without = zero3();
  without.wires.set("grad", "sign");
  EXPECT_NE(refusal(without).find("keep what it loses"), std::string::npos) << refusal(without);
  Table params = zero3();
  params.wires.set("param", "sign");
  EXPECT_NE(refusal(params).find("cannot represent its value"), std::string::npos);
}

Table with_deltas(const char* wires, const char* base) {
  Table table = preset("zero1", {.precision = Dtype::kBf16});
  table.wires.set("publish", wires);
  if (*base != '\0') table.set(Role::kParam, Phase::kUpdate, Placement::parse(base));
  return table;
}

TEST(CheckTest, DeltasStartFromABaseBesideTheMasters) {
  EXPECT_EQ(refusal(with_deltas("int4", "SS@device:bf16")), "");
  EXPECT_EQ(refusal(with_deltas("node:int8/32", "SS@device:bf16")), "");
  EXPECT_EQ(refusal(with_deltas("node:int4,local:int4", "SS@device:bf16")), "");
  Table away = with_deltas("int4", "SS@device:bf16");
  away.set(Role::kParam, Phase::kRest, Placement::parse("RR@host:bf16"));
  Table turned = with_deltas("int4", "SS@device:bf16");
  turned.set(Role::kOptim, Phase::kRest, Placement::parse("RS@device:fp32"));
  Table sharded = zero3();
  sharded.wires.set("publish", "int4");
  Table ddp = preset("ddp", {.precision = Dtype::kBf16});
  ddp.wires.set("publish", "int4");
  // From SS to SR, parameters are gathered over both axes and sliced.
  Table slices = with_deltas("int4", "SS@device:bf16");
  slices.set(Role::kParam, Phase::kRest, Placement::parse("SR@device:bf16"));
  Table crosses = with_deltas("int4", "SR@device:bf16");
  crosses.set(Role::kParam, Phase::kRest, Placement::parse("RS@device:bf16"));
  for (const Phase phase : {Phase::kRest, Phase::kUpdate}) {
    crosses.set(Role::kOptim, phase, Placement::parse("SR@device:fp32"));
  }
  crosses.set(Role::kGrad, Phase::kUpdate, Placement::parse("SR@device:bf16"));
  struct Case {
    Table table;
    const char* says;
  };
  const Case cases[] = {
      {with_deltas("int4", ""), "base: deltas are computed where masters are updated"},
      {with_deltas("int4", "SS@host:bf16"), "it can only be \"SS@device:bf16\""},
      {with_deltas("int4", "RS@device:bf16"), "it can only be \"SS@device:bf16\""},
      {with_deltas("int4", "SS@device:fp32"), "it can only be \"SS@device:bf16\""},
      {with_deltas("plain", "SS@device:bf16"), "base: only deltas need this cell"},
      {with_deltas("sign", "SS@device:bf16"), "write int4 or int8, and nearest"},
      {with_deltas("int4/stochastic", "SS@device:bf16"), "write int4 or int8, and nearest"},
      {with_deltas("node:int4,local:int8", "SS@device:bf16"), "a delta is rounded once"},
      {sharded, "table.wire.publish is \"int4/128\": wire: no parameter travels over the axis"},
      {away, "base: table.wire.publish adds deltas to the parameters at rest"},
      {turned, "table.optim.rest is \"RS@device:fp32\": base: with table.wire.publish"},
      {slices, "write \"RR@device:bf16\""},
      {crosses, "write \"RR@device:bf16\""},
      {ddp, "over the axis node while table.optim.update is \"RR@device:fp32\""},
  };
  for (const Case& one : cases) {
    EXPECT_NE(refusal(one.table).find(one.says), std::string::npos) << one.says << "\n"
                                                                    << refusal(one.table);
  }
}

TEST(CheckTest, MomentsAreFp32OrBf16) {
  Table table = with(Role::kOptim, Phase::kRest, "SS@device:fp16");
  table.set(Role::kOptim, Phase::kUpdate, Placement::parse("SS@device:fp16"));
  EXPECT_NE(refusal(table).find("moments: "), std::string::npos);
}

TEST(CheckTest, WhatElseTheRunAsksFor) {
  const Table on_disk = preset("zero2", {.precision = Dtype::kBf16, .optim_tier = Tier::kDisk});
  EXPECT_NE(refusal(on_disk, {.own_optimizer = true}).find("own optimizer: "), std::string::npos);
  const Table moves = with(Role::kOptim, Phase::kRest, "RS@device:fp32");
  EXPECT_NE(refusal(moves, {.own_optimizer = true}).find("own optimizer: "), std::string::npos);
  const Table whole = preset("ddp", {.precision = Dtype::kBf16, .optim_tier = Tier::kHost});
  EXPECT_NE(refusal(whole, {.late_update = true}).find("late: "), std::string::npos);
  EXPECT_EQ(refusal(zero3(), {.late_update = true}), "");
}

TEST(CheckTest, EveryPrincipleIsDocumented) {
  std::ifstream file(PENSTOCK_SOURCE_DIR "/docs/tables.md");
  std::stringstream text;
  text << file.rdbuf();
  for (const char* principle : {"compute", "sum", "precision", "moments", "together", "wire",
                                "residual", "base", "own optimizer", "late"}) {
    EXPECT_NE(text.str().find(concat("- `", principle, "`: ")), std::string::npos) << principle;
  }
}

}  // namespace
}  // namespace penstock::check_test
