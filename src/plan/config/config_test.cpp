#include "penstock/config.h"

#include <gtest/gtest.h>

#include <fstream>
#include <set>
#include <string>
#include <vector>
#include <nlohmann/json.hpp>

#include "penstock/error.h"
#include "src/base/text.h"

namespace penstock::config_test {
namespace {

using nlohmann::json;

std::string error_of(const std::string& text, int world_size = 0) {
  try {
    Config config = Config::parse(text);
    if (world_size > 0) config.resolve(world_size);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

TEST(Config, EmptyIsAllDefaults) {
  EXPECT_EQ(Config::parse("{}").json(), Config().json());
  EXPECT_EQ(Config::parse(Config().json()).json(), Config().json());
}

const char* const kEverything = R"({
  "strategy": "hpz", "table": {"param": {"rest": "SS@device:bf16"}},
  "mesh": {"data": 8, "tensor": 1, "node": 2}, "precision": "bf16",
  "dtypes": {"z.*": "fp32", "a.*": "bf16"}, "offload": {"optimizer": "none", "activations": "host"},
  "memory": {"device_bytes": "1.5GiB", "host_bytes": 2e9},
  "activations": {"checkpoint": 3},
  "optimizer": {"type": "adamw", "lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1,
                "moments_dtype": "bf16"},
  "schedule": {"type": "cosine", "warmup_steps": 10, "total_steps": 100, "min_ratio": 0.1},
  "batch": {"micro": 2, "global": 64}, "clip": 1,
  "units": {"modules": ["Block"], "max_bytes": 1e6, "layer_bytes": 4096},
  "tiling": {"max_bytes": 1e8, "modules": ["*.up"], "loss_tokens": 512, "head": "lm_head"},
  "prefetch_bytes": 5e8, "comm": {"backend": "gloo", "bucket_bytes": 0, "timeout_s": 30,
                                    "warn_s": 2.5, "report_dir": "/tmp"},
  "checkpoint": {"path": "/data", "keep": 3,
                                                     "signals": ["SIGTERM"]}, "monitor": null, "seed": 7})";

TEST(Config, ReadsEveryKey) {
  Config config = Config::parse(kEverything);
  EXPECT_EQ(config.strategy, "hpz");
  EXPECT_EQ(config.table["param"]["rest"], "SS@device:bf16");
  EXPECT_EQ(config.mesh.data, 8);
  EXPECT_EQ(config.mesh.node, 2);
  EXPECT_EQ(config.precision, "bf16");
  EXPECT_EQ(config.dtypes[0].first, "z.*");  // the order given, not sorted
  EXPECT_EQ(config.optimizer->type, OptimizerType::kAdamW);
  EXPECT_EQ(config.optimizer->lr, 3e-4);
  EXPECT_EQ(config.optimizer->betas[1], 0.95);
  EXPECT_EQ(config.optimizer->eps, 1e-6);
  EXPECT_EQ(config.optimizer->moments_dtype, "bf16");
  EXPECT_EQ(config.optimizer->weight_decay, 0.1);
  EXPECT_EQ(config.schedule.warmup_steps, 10);
  EXPECT_EQ(config.schedule.total_steps, 100);
  EXPECT_EQ(config.schedule.min_ratio, 0.1);
  EXPECT_EQ(config.clip, 1.0);
  EXPECT_EQ(config.units.modules, std::vector<std::string>{"Block"});
  EXPECT_EQ(config.units.max_bytes, 1000000);
  EXPECT_EQ(config.units.layer_bytes, 4096);
  EXPECT_EQ(config.tiling.max_bytes, 100000000);
  EXPECT_EQ(config.tiling.modules, std::vector<std::string>{"*.up"});
  EXPECT_EQ(config.tiling.loss_tokens, 512);
  EXPECT_EQ(config.tiling.head, "lm_head");
  EXPECT_EQ(config.prefetch_bytes, 500000000);
  EXPECT_EQ(config.comm.backend, "gloo");
  EXPECT_EQ(config.comm.bucket_bytes, 0);
  EXPECT_EQ(config.comm.timeout_s, 30.0);
  EXPECT_EQ(config.comm.warn_s, 2.5);
  EXPECT_EQ(config.comm.report_dir, "/tmp");
  EXPECT_EQ(config.checkpoint.path, "/data");
  EXPECT_EQ(config.checkpoint.keep, 3);
  EXPECT_EQ(config.seed, 7);
  EXPECT_EQ(config.memory.device_bytes, 3LL << 29);
  EXPECT_EQ(config.memory.host_bytes, 2000000000);
  EXPECT_EQ(config.activations.checkpoint, 3);
  EXPECT_EQ(config.offload.activations, "host");
  EXPECT_EQ(Config::parse(R"({"activations": {"checkpoint": "unit"}})").activations.checkpoint, 1);
  EXPECT_EQ(Config::parse(R"({"activations": {"checkpoint": "none"}})").activations.checkpoint, 0);
}

TEST(Config, BytesMayBeTextWithAUnit) {
  const Config config = Config::parse(
      R"({"offload": {"optimizer": "disk", "window_bytes": "64KiB"}, "prefetch_bytes": "1.5GiB",
          "memory": {"device_bytes": "1MB", "host_bytes": "2 TiB"},
          "units": {"max_bytes": "3MiB", "layer_bytes": "64 KiB"}, "tiling": {"max_bytes": "1MiB"},
          "comm": {"bucket_bytes": "0"}})");
  EXPECT_EQ(config.offload.window_bytes, 64 << 10);
  EXPECT_EQ(config.prefetch_bytes, 3LL << 29);
  EXPECT_EQ(config.memory.device_bytes, 1'000'000);
  EXPECT_EQ(config.memory.host_bytes, 2LL << 40);
  EXPECT_EQ(config.units.max_bytes, 3 << 20);
  EXPECT_EQ(config.units.layer_bytes, 64 << 10);
  EXPECT_EQ(config.tiling.max_bytes, 1 << 20);
  EXPECT_EQ(config.comm.bucket_bytes, 0);
}

// Lists every key whose value is in bytes, so that no new one is forgotten.
TEST(Config, EveryKeyOfBytesTakesText) {
  const json flat = json::parse(Config().json()).flatten();
  int num_keys = 0;
  for (const auto& [path, value] : flat.items()) {
    if (!path.ends_with("_bytes")) continue;
    json config = {{"inference", true}, {"offload", {{"optimizer", "disk"}}}};
    config[json::json_pointer(path)] = "5 MiB";
    const json read = json::parse(Config::parse(config.dump()).json());
    EXPECT_EQ(read[json::json_pointer(path)], 5 << 20) << path;
    ++num_keys;
  }
  EXPECT_EQ(num_keys, 9);
}

TEST(Config, FoldersOfAMachineAreNotCompared) {
  const auto lines = [](const std::string& offload, const std::string& comm) {
    return Config::parse(concat(R"({"offload": {"optimizer": "disk")", offload, R"(}, "comm": {)",
                                comm, "}}"))
        .lines();
  };
  const std::string plain = lines("", "");
  EXPECT_EQ(lines(R"(, "path": "/scratch/0")", R"("report_dir": "/var/log")"), plain);
  EXPECT_EQ(lines("", R"(}, "checkpoint": {"path": "/data")"), plain);
  EXPECT_NE(lines("", R"("warn_s": 3)"), plain);
  EXPECT_NE(plain.find("config /offload/optimizer = \"disk\"\n"), std::string::npos);
}

TEST(Config, AutoIsOneWordOrOnePerRole) {
  const OffloadConfig both = Config::parse(R"({"offload": "auto"})").offload;
  EXPECT_EQ(both.optimizer + both.params + both.activations, "autoautonone");
  const OffloadConfig one =
      Config::parse(R"({"offload": {"params": "auto", "path": "/tmp"}})").offload;
  EXPECT_EQ(one.optimizer + one.params + one.path, "noneauto/tmp");
}

TEST(Config, JsonReadsBackTheSame) {
  for (
      const char* text :
      {"{}", kEverything, R"({"offload": "auto"})",
       R"({"optimizer": {"type": "SGD", "momentum": 0.9, "moments_dtype": "bf16"}})",
       R"({"optimizer": {"type": "Adam"}})", R"({"optimizer": {"type": "Lion"}})",
       R"({"optimizer": {"type": "adagrad", "lr_decay": 0.1}})", R"({"precision": "fp16"})",
       R"({"precision": "fp16", "loss_scale": {"initial": 16, "window": 0, "min": 2}})",
       R"({"precision": "fp16", "loss_scale": {"settle": 1, "hysteresis": 2, "refill": "step"}})",
       R"({"batch": {"micro": 2, "global": 64}})",
       R"({"activations": {"checkpoint": 3}, "offload": {"activations": "host"}})",
       R"({"activations": {"checkpoint": "unit"}, "offload": {"activations": "disk", "path": "/a"}})",
       R"({"offload": {"params": "disk", "path": "/a:/b", "checksums": true, "timeout_s": 5}})",
       R"({"offload": {"optimizer": "disk", "window_bytes": "3MiB"}})",
       R"({"schedule": {"type": "constant", "warmup_steps": 3}})"}) {
    Config config = Config::parse(text);
    EXPECT_EQ(Config::parse(config.json()).json(), config.json());
    config.resolve(8);
    EXPECT_EQ(Config::parse(config.json()).json(), config.json());
  }
}

TEST(Config, JsonIsSortedAndCanonical) {
  const Config a = Config::parse(R"({"clip": 1, "strategy": "ddp"})");
  const Config b = Config::parse(R"({"strategy": "ddp", "clip": 1.0})");
  EXPECT_EQ(a.json(), b.json());
  EXPECT_LT(a.json().find("\"batch\""), a.json().find("\"clip\""));
}

TEST(Config, WeightDecayDefaultsAreThoseOfTorch) {
  EXPECT_EQ(Config::parse(R"({"optimizer": {}})").optimizer->weight_decay, 0.01);
  EXPECT_EQ(Config::parse(R"({"optimizer": {"type": "ADAMW"}})").optimizer->weight_decay, 0.01);
  EXPECT_EQ(Config::parse(R"({"optimizer": {"type": "adam"}})").optimizer->weight_decay, 0.0);
  EXPECT_EQ(Config::parse(R"({"optimizer": {"type": "sgd"}})").optimizer->weight_decay, 0.0);
}

struct Bad {
  std::string text;
  std::vector<std::string> says;  // the message has all of these
  int world_size = 0;             // resolve() when not 0
};

void PrintTo(const Bad& bad, std::ostream* out) { *out << bad.text; }

class BadConfigTest : public testing::TestWithParam<Bad> {};

TEST_P(BadConfigTest, MessageNamesKeyValueAndFix) {
  const std::string message = error_of(GetParam().text, GetParam().world_size);
  const std::string layer =
      GetParam().world_size > 0 ? "[plan::Config::resolve] " : "[plan::Config::parse] ";
  EXPECT_EQ(message.rfind(layer, 0), 0U) << GetParam().text << "\n" << message;
  for (const std::string& part : GetParam().says)
    EXPECT_NE(message.find(part), std::string::npos) << part << "\nis not in\n" << message;
}

INSTANTIATE_TEST_SUITE_P(
    UnknownKeys, BadConfigTest,
    testing::Values(
        Bad{R"({"stratgy": "ddp"})",
            {R"(unknown key "stratgy"; did you mean "strategy"? (valid keys: activations, batch,)"}},
        Bad{R"({"Clip": 1})", {R"(did you mean "clip"?)"}},
        Bad{R"({"zzzzqqqqxxxx": 1})", {R"(unknown key "zzzzqqqqxxxx" (valid keys: )"}},
        Bad{R"({"mesh": {"dta": 1}})", {R"("mesh.dta"; did you mean "mesh.data"?)"}},
        Bad{R"({"optimizer": {"beta": 1}})", {R"(did you mean "optimizer.betas"?)"}},
        Bad{R"({"schedule": {"warmup": 1}})", {R"(unknown key "schedule.warmup")"}},
        Bad{R"({"batch": {"mikro": 1}})", {R"(did you mean "batch.micro"?)"}},
        Bad{R"({"units": {"module": 1}})", {R"(did you mean "units.modules"?)"}},
        Bad{R"({"comm": {"timeout": 1}})", {R"(unknown key "comm.timeout")"}},
        Bad{R"({"offload": {"param": "none"}})", {R"(did you mean "offload.params"?)"}},
        Bad{R"({"table": {"parm": {}}})", {R"(did you mean "table.param"?)"}},
        Bad{R"({"table": {"grad": {"rest": "SS@device:bf16"}}})",
            {R"(unknown key "table.grad.rest")", "backward, hold, update"}},
        Bad{R"({"clip": 1, "clip": 2})", {R"(key "clip" is given twice)"}}));

INSTANTIATE_TEST_SUITE_P(
    Values, BadConfigTest,
    testing::Values(
        Bad{"{", {"not valid JSON"}}, Bad{"[]", {"\"config\" is []", "an object"}},
        Bad{R"({"clip": 1e999})", {"not valid JSON"}},
        Bad{R"({"strategy": "zero33"})", {R"("strategy" is "zero33")", R"(did you mean "zero3"?)"}},
        Bad{R"({"strategy": 3})", {R"("strategy" is 3; allowed: "ddp", "zero1")"}},
        Bad{R"({"precision": "fp8"})", {R"("precision" is "fp8")", R"("fp32", "bf16")"}},
        Bad{R"({"clip": "x"})", {R"("clip" is "x"; allowed: a number >= 0)"}},
        Bad{R"({"clip": -1})", {R"("clip" is -1)"}}, Bad{R"({"clip": true})", {"is true"}},
        Bad{R"({"seed": -1})", {R"("seed" is -1)"}}, Bad{R"({"seed": 1.5})", {"a whole number"}},
        Bad{R"({"prefetch_bytes": "64 M"})",
            {R"("prefetch_bytes" is "64 M"; allowed: a whole number of bytes >= 0, or text)"}},
        Bad{R"({"mesh": {"data": 0}})", {R"("mesh.data" is 0)", ">= 1"}},
        Bad{R"({"mesh": 8})", {R"("mesh" is 8; allowed: an object)"}},
        Bad{R"({"mesh": {"data": 4294967297}})", {R"("mesh.data" is 4294967297)"}},
        Bad{R"({"dtypes": {"a": "int8"}})", {R"("dtypes.a" is "int8")"}},
        Bad{R"({"dtypes": {"": "fp32"}})", {"empty name pattern"}},
        Bad{R"({"table": {"param": {"rest": "XX@device:bf16"}}})",
            {R"("table.param.rest" is "XX@device:bf16")", "R, S or P"}},
        Bad{R"({"table": {"param": {"rest": "SS@device:bf61"}}})",
            {"table.param.rest", "did you mean 'bf16'"}},
        Bad{R"({"offload": "atuo"})", {R"("offload" is "atuo"; allowed: "auto" or an object)"}},
        Bad{R"({"offload": {"params": "dsk"}})", {R"(did you mean "disk"?)"}},
        Bad{R"({"offload": {"optimizer": "disk", "window_bytes": 0}})",
            {R"("offload.window_bytes" is 0)", "4GiB"}},
        Bad{R"({"memory": {"device_bytes": "4 gigs"}})",
            {R"("memory.device_bytes" is "4 gigs")", R"(such as "4GiB")"}},
        Bad{R"({"memory": {"host_bytes": 0}})", {R"("memory.host_bytes" is 0)", ">= 1"}},
        Bad{R"({"memory": {"host": 1}})", {R"(unknown key "memory.host")"}},
        Bad{R"({"table": {"param": {"rest": 5}}})", {R"("table.param.rest" is 5; allowed: text)"}},
        Bad{R"({"optimizer": {"type": "SDG"}})", {R"(did you mean "SGD"?)"}},
        Bad{R"({"optimizer": {"betas": 0.9}})", {R"("optimizer.betas" is 0.9)", "[beta1, beta2]"}},
        Bad{R"({"optimizer": {"betas": [0.9, 1.0]}})", {"[0.9,1.0]"}},
        Bad{R"({"optimizer": {"moments_dtype": "fp16"}})",
            {R"("optimizer.moments_dtype" is "fp16"; allowed: "fp32", "bf16")"}},
        Bad{R"({"optimizer": {"lr": -1}})", {R"("optimizer.lr" is -1)"}},
        Bad{R"({"optimizer": {"type": "SGD", "nesterov": 1}})", {"true or false"}},
        Bad{R"({"schedule": {"type": "linear"}})", {R"("schedule.total_steps" is missing)"}},
        Bad{R"({"schedule": {"type": "linear", "total_steps": 4, "warmup_steps": 5}})",
            {R"("schedule.warmup_steps" is 5)", "which is 4"}},
        Bad{R"({"schedule": {"type": "cosine", "total_steps": 4, "min_ratio": 2}})",
            {"from 0 to 1"}},
        Bad{R"({"units": {"layer_bytes": 0}})", {R"("units.layer_bytes" is 0)"}},
        Bad{R"({"tiling": {"max_bytes": -1}})", {R"("tiling.max_bytes" is -1)"}},
        Bad{R"({"tiling": {"modules": [""]}})", {R"("tiling.modules" is [""])", "module names"}},
        Bad{R"({"activations": {"checkpoint": 1}})",
            {R"("activations.checkpoint" is 1)", "a whole number k >= 2"}},
        Bad{R"({"activations": {"checkpoint": 2.5}})", {"a whole number k >= 2"}},
        Bad{R"({"activations": {"checkpoint": "units"}})", {R"(did you mean "unit"?)"}},
        Bad{R"({"activations": {"checkpoint": true}})", {R"("activations.checkpoint" is true)"}},
        Bad{R"({"activations": {"checkpoints": 2}})",
            {R"(did you mean "activations.checkpoint"?)"}},
        Bad{R"({"units": {"modules": "Block"}})", {R"("units.modules" is "Block")", "a list"}},
        Bad{R"({"comm": {"timeout_s": 0}})", {R"("comm.timeout_s" is 0)"}},
        Bad{R"({"offload": {"params": "disk", "timeout_s": 0}})", {R"("offload.timeout_s" is 0)"}},
        Bad{R"({"offload": {"params": "disk", "checksums": 1}})",
            {R"("offload.checksums" is 1)", "true or false"}}));

INSTANTIATE_TEST_SUITE_P(
    NoEffect, BadConfigTest,
    testing::Values(
        Bad{R"({"optimizer": {"momentum": 0.9}})",
            {R"("optimizer.momentum" is 0.9, which has no effect with optimizer.type "AdamW")"}},
        Bad{R"({"optimizer": {"type": "SGD", "betas": [0.9, 0.9]}})", {"no effect", "SGD"}},
        Bad{R"({"optimizer": {"type": "SGD", "dampening": 0.5}})", {"momentum is 0"}},
        Bad{R"({"optimizer": {"type": "SGD", "nesterov": true}})", {"momentum > 0"}},
        Bad{R"({"optimizer": {"type": "Lion", "eps": 1e-8}})", {"no effect", "Lion"}},
        Bad{R"({"optimizer": {"type": "Adagrad", "betas": [0.9, 0.9]}})", {"no effect", "Adagrad"}},
        Bad{R"({"optimizer": {"type": "Adagrad", "moments_dtype": "bf16"}})",
            {"no effect", "Adagrad"}},
        Bad{R"({"optimizer": {"type": "SGD", "moments_dtype": "bf16"}})", {"momentum is 0"}},
        Bad{R"({"precision": "bf16", "loss_scale": {"initial": 8}})", {"no effect", "bf16"}},
        Bad{R"({"precision": "bf16", "loss_scale": {"hysteresis": 2}})", {"no effect", "bf16"}},
        Bad{R"({"loss_scale": {"hysteresis": 0}})", {R"("loss_scale.hysteresis" is 0)"}},
        Bad{R"({"loss_scale": {"settle": -1}})", {R"("loss_scale.settle" is -1)"}},
        Bad{R"({"loss_scale": {"refill": "never"}})", {R"("growth", "step")"}},
        Bad{R"({"loss_scale": {"initial": 8, "min": 9}})", {R"("loss_scale.min" is 9)"}},
        Bad{R"({"schedule": {"warmup_steps": 5}})", {"no effect", R"(schedule.type "none")"}},
        Bad{R"({"schedule": {"type": "constant", "min_ratio": 0.5}})", {"no effect"}},
        Bad{R"({"tiling": {"modules": ["head"]}})", {"no effect while tiling.max_bytes is 0"}},
        Bad{R"({"tiling": {"head": "x"}})", {"no effect while tiling.loss_tokens is 0"}},
        Bad{R"({"offload": {"activations": "host"}})",
            {R"("offload.activations" is "host")", R"(Set "activations.checkpoint" to)"}},
        Bad{R"({"offload": {"activations": "host"}, "activations": {"checkpoint": "none"}})",
            {R"(Set "activations.checkpoint" to)"}},
        Bad{R"({"offload": {"activations": "host", "path": "/tmp"},
                "activations": {"checkpoint": "unit"}})",
            {R"("offload.path")", "no effect"}},
        Bad{R"({"offload": {"path": "/tmp"}})", {R"("offload.path" is "/tmp")", "no effect"}},
        Bad{R"({"offload": {"gradients": "disk"}})", {R"("offload.gradients")", "needs"}},
        Bad{R"({"offload": {"late_update": true}})", {R"("offload.late_update")", "no effect"}},
        Bad{R"({"offload": {"params": "disk", "window_bytes": "1MiB"}})",
            {"offload.window_bytes", "no effect", R"(unless offload.optimizer is "disk")"}},
        Bad{R"({"offload": {"params": "host", "keep_bytes": 1}})",
            {"offload.keep_bytes", "no effect", R"(unless "inference" is true)"}},
        Bad{R"({"quantize": {"dtype": "int3"}})", {R"("quantize.dtype" is "int3")", "int4"}},
        Bad{R"({"quantize": {"params": ["*"]}})", {"quantize.params", "no effect"}},
        Bad{R"({"quantize": {"cache": "int8"}})", {"quantize.cache", "no effect"}},
        Bad{R"({"offload": {"cache": "auto"}})", {R"("offload.cache" is "auto")", "host"}},
        Bad{R"({"table": {"cache": {"rest": "SS@host:bf16"}}})", {"table.cache", "offload.cache"}},
        Bad{R"({"quantize": {"dtype": "int8", "params": "*"}})", {"a list of name patterns"}},
        Bad{R"({"offload": {"params": "host", "checksums": true}})",
            {"offload.checksums", "no effect"}},
        Bad{R"({"offload": {"timeout_s": 5}})", {R"("offload.timeout_s" is 5)", "no effect"}}));

INSTANTIATE_TEST_SUITE_P(
    NotYet, BadConfigTest,
    testing::Values(
        Bad{R"({"mesh": {"tensor": 0}})", {R"("mesh.tensor" is 0)", "a whole number >= 1"}},
        Bad{R"({"parallel": {"rules": ["*"]}})", {"parallel.rules", "{name pattern: style}"}},
        Bad{R"({"parallel": {"rules": {"*.up": 3}}})", {"\"parallel.rules.*.up\" is 3"}},
        Bad{R"({"parallel": {"rules": {"": "row"}}})", {"an empty name pattern"}},
        Bad{R"({"parallel": {"rule": {}}})", {"did you mean \"parallel.rules\"?"}},
        Bad{R"({"mesh": {"sequence": "2"}})", {"a whole number >= 1"}},
        Bad{R"({"mesh": {"expert": 0}})", {"a whole number >= 1"}},
        Bad{R"({"table": {"act": {"hold": "RR@host:bf16"}}})", {"\"offload.activations\""}},
        Bad{R"({"comm": {"backend": "nccl"}})", {R"("comm.backend" is "nccl")", "gloo"}},
        Bad{R"({"comm": {"codec": "lz4"}})", {R"("comm.codec" is "lz4")"}},
        Bad{R"({"comm": {"outer_every": 8}})",
            {R"("comm.outer_every" is 8, which has no effect without comm.codec "local")"}},
        Bad{R"({"comm": {"codec": "local", "outer_every": 0}})", {R"("comm.outer_every" is 0)"}},
        Bad{R"({"comm": {"codec": "local", "outer_wire": "sign/128"}})",
            {R"("comm.outer_wire" is "sign/128")", "int4/128"}},
        Bad{R"({"comm": {"codec": "local", "outer_wire": "int4/128/nearest"}})",
            {R"("comm.outer_wire" is "int4/128/nearest")"}},
        Bad{R"({"comm": {"codec": "local", "outer_wire": "int3"}})", {R"("comm.outer_wire")"}},
        Bad{R"({"comm": {"codec": "local", "outer_lr": 0}})", {R"("comm.outer_lr" is 0)"}},
        Bad{R"({"comm": {"codec": "local", "exact_first": 2}})",
            {R"("comm.exact_first" is 2, which has no effect with comm.codec "local")"}},
        Bad{R"({"table": {"wire": {"grad": "int9"}}})", {R"("table.wire.grad" is "int9")"}},
        Bad{R"({"checkpoint": {"keep": -1}})", {R"("checkpoint.keep" is -1)", ">= 0"}},
        Bad{R"({"checkpoint": {"path": "/a", "signals": ["SIGTERN"]}})", {"SIGTERN", "SIGTERM"}},
        Bad{R"({"checkpoint": {"signals": ["SIGTERM"]}})", {"need \"checkpoint.path\""}},
        Bad{R"({"monitor": {"csv": true}})", {"unknown key \"monitor.csv\""}},
        Bad{R"({"monitor": {"path": "a", "formats": "csv"}})", {"a list of \"jsonl\""}},
        Bad{R"({"monitor": {"path": "a", "trace_steps": 2}})", {"monitor.trace_first is 0"}}));

INSTANTIATE_TEST_SUITE_P(
    Worlds, BadConfigTest,
    testing::Values(
        Bad{R"({"mesh": {"data": 3}})", {R"("mesh.data" is 3, but 8 ranks)", "set it to 8"}, 8},
        Bad{R"({"mesh": {"node": 3}})", {R"("mesh.node" is 3)", "8 data-parallel ranks"}, 8},
        Bad{R"({"strategy": "hpz", "mesh": {"node": 4}})", {R"("mesh.node" is 4)"}, 6},
        Bad{R"({"batch": {"micro": 3, "global": 64}})",
            {R"("batch.global" is 64)", "batch.micro 3 x 8", "= 24", "multiple of 24"},
            8},
        Bad{R"({"batch": {"accumulate": 3, "global": 64}})", {"batch.accumulate 3 x 8"}, 8},
        Bad{R"({"batch": {"micro": 2, "accumulate": 2, "global": 64}})",
            {"batch.micro 2 x batch.accumulate 2 x 8 data-parallel ranks = 32"},
            8}));

struct BatchCase {
  std::string text;
  int world_size;
  int64_t micro, accumulate, global;
};

class ResolveTest : public testing::TestWithParam<BatchCase> {};

TEST_P(ResolveTest, AnyTwoGiveTheThird) {
  const BatchCase& c = GetParam();
  Config config = Config::parse(c.text);
  for (int again = 0; again < 2; ++again) {
    config.resolve(c.world_size);
    EXPECT_EQ(config.mesh.data, c.world_size);
    EXPECT_EQ(config.batch.micro, c.micro) << c.text;
    EXPECT_EQ(config.batch.accumulate, c.accumulate) << c.text;
    EXPECT_EQ(config.batch.global, c.global) << c.text;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Batches, ResolveTest,
    testing::Values(BatchCase{"{}", 4, 0, 1, 0},
                    BatchCase{R"({"batch": {"accumulate": 3}})", 4, 0, 3, 0},
                    BatchCase{R"({"batch": {"micro": 2}})", 4, 2, 1, 8},
                    BatchCase{R"({"batch": {"global": 8}})", 4, 2, 1, 8},
                    BatchCase{R"({"batch": {"micro": 2, "accumulate": 3}})", 4, 2, 3, 24},
                    BatchCase{R"({"batch": {"micro": 2, "global": 24}})", 4, 2, 3, 24},
                    BatchCase{R"({"batch": {"accumulate": 3, "global": 24}})", 4, 2, 3, 24},
                    BatchCase{R"({"batch": {"micro": 2, "accumulate": 3, "global": 6}})", 1, 2, 3,
                              6}));

TEST(Config, NodesDivideTheDataAxis) {
  Config config = Config::parse(R"({"strategy": "mics", "mesh": {"node": 2}})");
  config.resolve(6);
  EXPECT_EQ(config.mesh.data, 6);
}

// docs/config.md: rows "| `key` | `default` | ...".
TEST(Config, DocumentedKeysAndDefaultsAreTheRealOnes) {
  std::ifstream file(std::string(PENSTOCK_SOURCE_DIR) + "/docs/config.md");
  ASSERT_TRUE(file) << "docs/config.md";
  json documented = json::object();
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("| `", 0) != 0) continue;
    const std::vector<std::string> cells = split(line, '`');
    std::string pointer = "/" + cells[1];
    for (char& c : pointer) c = c == '.' ? '/' : c;
    if (cells[1] == "optimizer") {
      EXPECT_EQ(cells[3], "null");
      continue;
    }
    documented[json::json_pointer(pointer)] = json::parse(cells[3]);
  }
  json adamw = json::parse(Config::parse(R"({"optimizer": {}})").json());
  for (const char* type : {"SGD", "Adagrad"}) {
    const Config other = Config::parse(concat(R"({"optimizer": {"type": ")", type, R"("}})"));
    const json with_others = json::parse(other.json());
    for (const char* key : {"momentum", "dampening", "nesterov", "lr_decay"}) {
      if (with_others["optimizer"].contains(key))
        adamw["optimizer"][key] = with_others["optimizer"][key];
    }
  }
  EXPECT_EQ(documented, adamw) << json::diff(documented, adamw).dump(1);
}

}  // namespace
}  // namespace penstock::config_test
