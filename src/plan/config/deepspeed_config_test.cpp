#include "penstock/deepspeed_config.h"

#include <gtest/gtest.h>

#include <string>

#include "penstock/config.h"
#include "penstock/error.h"

namespace penstock::deepspeed_config_test {
namespace {

struct Taken {
  const char* deepspeed;
  const char* line;  // line of the native config
  int world = 2;
};

void expect_taken(const Taken& one) {
  std::string text = one.deepspeed;
  const size_t infinite = text.find("1e999");
  if (infinite != std::string::npos) text.replace(infinite, 5, "2000000000");
  Config config = Config::parse(translate_deepspeed_config(text, one.world).native);
  config.resolve(one.world);
  EXPECT_NE(config.lines().find(std::string("config ") + one.line + "\n"), std::string::npos)
      << text << "\n"
      << config.lines();
}

// The native value of each key.
TEST(DeepSpeedConfig, KeysAreTakenOver) {
  const Taken cases[] = {
      {"{}", "/strategy = \"ddp\""},
      {"{}", "/clip = 1.0"},
      {"{}", "/precision = null"},
      {R"({"zero_optimization": true})", "/strategy = \"zero1\""},
      {R"({"zero_optimization": {"stage": 2}})", "/strategy = \"zero2\""},
      {R"({"zero_optimization": {"stage": 3}})", "/strategy = \"zero3\""},
      {R"({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}})",
       "/strategy = \"hpz\"", 4},
      {R"({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}})", "/mesh/node = 2", 4},
      {R"({"zero_optimization": {"stage": 3, "mics_shard_size": 1}})", "/mesh/node = 4", 4},
      {R"({"zero_optimization": {"stage": 3, "zero_quantized_weights": true}})",
       R"(/table/wire/param = "int8/128")"},
      {R"({"zero_optimization": {"stage": 3, "zero_quantized_gradients": true}})",
       R"(/table/wire/grad = "int8/128")"},
      {R"({"gradient_clipping": 0})", "/clip = 0.0"},
      {R"({"bf16": {"enabled": true}})", "/precision = \"bf16\""},
      {R"({"bfloat16": {"enabled": true}})", "/precision = \"bf16\""},
      {R"({"train_batch_size": 16})", "/batch/micro = 8"},
      {R"({"train_batch_size": 16, "gradient_accumulation_steps": 4})", "/batch/micro = 2"},
      {R"({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2})", "/batch/accumulate = 4"},
      {R"({"train_micro_batch_size_per_gpu": 2})", "/batch/global = 4"},
      {R"({"optimizer": {"type": "Adam", "params": {"lr": 0.5}}})", "/optimizer/type = \"AdamW\""},
      {R"({"optimizer": {"type": "Adam", "params": {"adam_w_mode": false}}})",
       "/optimizer/type = \"Adam\""},
      {R"({"optimizer": {"type": "AdamW", "params": {}}})", "/optimizer/weight_decay = 0.0"},
      {R"({"optimizer": {"type": "Adam", "params": {"torch_adam": true}}})",
       "/optimizer/weight_decay = 0.01"},
      {R"({"optimizer": {"type": "Adam", "params": {"torch_adam": true, "adam_w_mode": false}}})",
       "/optimizer/weight_decay = 0.0"},
      {R"({"optimizer": {"type": "AdamW", "params": {"torch_adam": true}}})",
       "/optimizer/weight_decay = 0.01"},
      {R"({"optimizer": {"type": "Adagrad"}})", "/optimizer/lr = 0.01"},
      {R"({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}})",
       "/offload/optimizer = \"host\""},
      {R"({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme",
          "nvme_path": "/x"}, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}})",
       "/offload/params = \"disk\""},
      {R"({"zero_optimization": {"stage": 2, "cpu_offload": true}})",
       "/offload/optimizer = \"host\""},
      {R"({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"},
          "offload_optimizer": {"device": "cpu"}}})",
       "/offload/params = \"none\""},
      {R"({"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 1e6}})",
       "/prefetch_bytes = 4000000"},
      {R"({"tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 2}}})", "/mesh/tensor = 2"},
      {R"({"tensor_parallel": {"autotp_size": 1}})", "/mesh/tensor = 1"},
      {R"({"tensor_parallel": {"autotp_size": 2}, "train_batch_size": 16})", "/batch/micro = 8", 4},
      // Values that frameworks leave in.
      {R"({"train_batch_size": "auto", "zero_optimization": {"stage": 1,
          "reduce_bucket_size": "auto", "offload_optimizer": {"device": "none", "nvme_path": null}},
          "zero_optimization.reduce_bucket_size": 5e8, "steps_per_print": 1e999 })",
       "/strategy = \"zero1\""},
  };
  for (const Taken& one : cases) expect_taken(one);
}

TEST(DeepSpeedConfig, ErrorFeedbackIsTakenOver) {
  const Taken cases[] = {
      {R"({"zero_optimization": {"stage": 3, "zero_quantized_gradients": true,
                                 "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024}}})",
       R"(/table/residual/rest = "PP@device:bf16")"},
      {R"({"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 20}}})",
       "/comm/exact_first = 20"},
      {R"({"optimizer": {"type": "OneBitAdam"}})", "/comm/codec = \"1bit\""},
      {R"({"optimizer": {"type": "ZeroOneAdam", "params": {"var_update_scaler": 8}}})",
       "/comm/exact_every = 8"},
      {R"({"optimizer": {"type": "ZeroOneAdam", "params": {"var_freeze_step": 30,
          "bias_correction": false, "local_step_scaler": 1000, "local_step_clipper": 16}}})",
       "/comm/exact_first = 16"},
      {R"({"optimizer": {"type": "ZeroOneAdam"}})", "/comm/codec = \"1bit\""},
      {R"({"optimizer": {"type": "OneBitAdam"}})", "/strategy = \"zero1\""},
  };
  for (const Taken& one : cases) expect_taken(one);
}

TEST(DeepSpeedConfig, LossScalesAreTakenOver) {
  const Taken cases[] = {
      {R"({"fp16": {"enabled": true}})", "/loss_scale/initial = 65536.0"},
      {R"({"fp16": {"enabled": true}})", "/loss_scale/window = 1000"},
      {R"({"fp16": {"enabled": true, "initial_scale_power": 8}})", "/loss_scale/initial = 256.0"},
      {R"({"fp16": {"enabled": true, "loss_scale": 128}})", "/loss_scale/window = 0"},
      {R"({"fp16": {"enabled": true, "loss_scale": 128}})", "/nonfinite = \"skip\""},
      {R"({"fp16": {"enabled": true}})", "/loss_scale/settle = 1"},
      {R"({"fp16": {"enabled": true, "hysteresis": 4}})", "/loss_scale/hysteresis = 1"},
      {R"({"fp16": {"enabled": true}})", "/nonfinite = \"skip\""},
      {R"({"fp16": {"enabled": true}, "zero_optimization": {"stage": 1}})",
       "/nonfinite = \"error\""},
      {R"({"fp16": {"enabled": true}, "zero_optimization": {"stage": 1}})",
       "/loss_scale/hysteresis = 2"},
      {R"({"fp16": {"enabled": true}, "zero_optimization": {"stage": 1}})",
       "/loss_scale/refill = \"growth\""},
      {R"({"fp16": {"enabled": true, "hysteresis": 4, "consecutive_hysteresis": true},
          "zero_optimization": {"stage": 3}})",
       "/loss_scale/refill = \"step\""},
      {R"({"data_types": {"param_dtype": "bfloat16"}, "bf16": {"enabled": true}})",
       "/precision = \"bf16\""},
  };
  for (const Taken& one : cases) expect_taken(one);
}

TEST(DeepSpeedConfig, ValuesAreTakenAsDeepSpeedReadsThem) {
  const Taken cases[] = {
      // TRL writes a key with a dot, which DeepSpeed does not read.
      {R"({"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 2},
          "zero_optimization.stage3_prefetch_bucket_size": 3686.4})",
       "/prefetch_bytes = 8"},
      {R"({"zero_optimization": {"stage": 2, "cpu_offload": "yes"}})",
       "/offload/optimizer = \"host\""},
      {R"({"zero_optimization": {"stage": 3, "cpu_offload_param": 1}})",
       "/offload/params = \"host\""},
      {R"({"zero_optimization": {"stage": 3, "prefetch_bucket_size": "2.0"}})",
       "/prefetch_bytes = 8"},
      {R"({"bf16": null, "bfloat16": {"enabled": 1.0}})", "/precision = \"bf16\""},
      {R"({"gradient_clipping": -1})", "/clip = 0.0"},
  };
  for (const Taken& one : cases) expect_taken(one);
}

TEST(DeepSpeedConfig, SequenceRanksShareSamples) {
  const Taken cases[] = {
      {R"({"sequence_parallel_size": 2, "train_batch_size": 16})", "/mesh/sequence = 2", 4},
      {R"({"sequence_parallel_size": 2, "train_batch_size": 16})", "/batch/micro = 8", 4},
      {R"({"sequence_parallel_size": 0})", "/mesh/sequence = 1"},
      {R"({"sequence_parallel_size": 2, "zero_optimization": {"stage": 3,
          "zero_hpz_partition_size": 4}})",
       "/mesh/node = 2", 8},
  };
  for (const Taken& one : cases) expect_taken(one);
}

struct Refused {
  const char* deepspeed;
  const char* says;
};

TEST(DeepSpeedConfig, WhatWouldTrainDifferentlyIsRefused) {
  const Refused cases[] = {
      {"[]", "not a JSON object"},
      {"{", "not valid JSON"},
      {R"({"strategy": "zero2", "bf16": {"enabled": true}})", "one dialect"},
      {R"({"zero_optimization": {"stage": 4}})", "from 0 to 3"},
      {R"({"zero_optimization": {"stag": 2}})", "did you mean \"zero_optimization.stage\""},
      {R"({"fp16": {"enabled": true, "loss_scal": 2}})", "did you mean \"fp16.loss_scale\""},
      {R"({"bf16": {"enabled": true}, "fp16": {"enabled": true}})", "both true"},
      {R"({"zero_optimization": {"stage": 3, "mics_shard_size": 3}})", "a divisor"},
      {R"({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}})", "no nvme_path"},
      {R"({"zero_optimization": {"zero_quantized_nontrainable_weights": true}})", "not supported"},
      {R"({"optimizer": {"type": "OneBitLamb"}})", "torch optimizer"},
      {R"({"optimizer": {"type": "AdamW", "params": {"bias_correction": false}}})", "corrected"},
      {R"({"train_batch_size": 15})", "a multiple"},
      {R"({"train_batch_size": "many"})", "a whole number of at least 1"},
      {R"({"train_batch_size": 2, "bf16": {"enabled": true, "enabled": false}})", "twice"},
      {R"({"zero_optimization": {"cpu_offload": false, "offload_optimizer": {}}})",
       R"(keep only "zero_optimization.offload_optimizer")"},
      {R"({"zero_optimization": {"compute_grad_norm": false}})", "true at stage 0"},
      {R"({"zero_optimization": {"stage": 2, "offload_optimizer": {"ratio": 0.5}}})",
       "1.0 at stage 2"},
      {R"({"fp16": {"enabled": true, "loss_scale_window": 0}})", "at least 1"},
      {R"({"fp16": {"enabled": true, "loss_scale": 0.5}})", "\"fp16.loss_scale\" is 0.5"},
      {R"({"zero_optimization": {"zenflow": {}}})", "zenflow\" is {}, which is not supported yet"},
      {R"({"gradient_allreduce_op": "sum", "zero_optimization": {"stage": 2, "zenflow": {}}})",
       "not supported with ZenFlow: remove \"zero_optimization.zenflow\""},
      {R"({"gradient_allreduce_op": "SUM", "compile": {"deepcompile": true}})",
       "not supported with DeepCompile: remove \"compile.deepcompile\""},
      {R"({"data_types": {"keep_in_fp32_modules": ["norm"]}})", "native key \"dtypes\""},
      {R"({"gradient_allreduce_op": "sum", "zero_optimization": {"stage": 3}})",
       "not supported with ZeRO stage 3"},
      {R"({"data_types": {"param_dtype": "bf16"}})", R"(allowed: "fp32")"},
      {R"({"data_types": {"param_dtype": "half"}, "bf16": {"enabled": true}})",
       R"(allowed: "bf16")"},
      {R"({"data_types": {"grad_accum_dtype": "fp8"}})", "torch.bfloat16"},
      {R"({"data_types": {"buffer_dtype": "int8"}})", "torch.bfloat16"},
      {R"({"sequence_parallel_size": 3})", "a divisor of the number of data ranks, 2"},
      {R"({"sequence_parallel_size": 2, "tensor_parallel": {"autotp_size": 2}})", "data ranks, 1"},
      {R"({"tensor_parallel": {"autotp_size": 2}, "zero_optimization": {"stage": 3,
          "zero_hpz_partition_size": 2}})",
       "a divisor of the number of data ranks, 1"},
      {R"({"tensor_parallel": {"autotp_size": 3}})", "a divisor of the number of ranks, 2"},
      {R"({"tensor_parallel": {"autotp_size": -1}})", "0, or a divisor"},
      {R"({"tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 4}}})", "1, or autotp_size, 2"},
      {R"({"tensor_parallel": {"injection_policy_tuple": ["x"]}})", "parallel.rules"},
      {R"({"tensor_parallel": {"tp": {"tp_group": 1}}})", "neighbours"},
      {R"({"tensor_parallel": {"autotp_sise": 2}})", "did you mean"},
      {R"({"curriculum_learning": {"enabled": true}})", "not supported"},
      {R"({"csv_monitor": {"output_pth": "x"}})", "did you mean \"csv_monitor.output_path\""},
  };
  for (const Refused& one : cases) {
    try {
      translate_deepspeed_config(one.deepspeed, 2);
      ADD_FAILURE() << one.deepspeed;
    } catch (const ConfigError& error) {
      EXPECT_NE(std::string(error.what()).find(one.says), std::string::npos) << error.what();
    }
  }
}

TEST(DeepSpeedConfig, WhatIsOffIsNoError) {
  const TranslatedConfig translated = translate_deepspeed_config(
      R"({"curriculum_learning": {"enabled": false, "curriculum_type": "seqlen"},
          "sparse_gradients": false, "gradient_allreduce_op": "MEAN",
          "data_types": {"keep_in_fp32_modules": "auto"}, "zero_optimization": {"zenflow": null},
          "optimizer": {"type": "AdamW", "params": {"bias_correction": true}}})",
      1);
  EXPECT_EQ(translated.given.size(), 5U);
}

TEST(DeepSpeedConfig, OneWarningListsWhatHasNoEffect) {
  const TranslatedConfig translated = translate_deepspeed_config(
      R"({"zero_optimization": {"stage": 2, "overlap_comm": true, "reduce_bucket_size": 5e8},
          "my_own_key": 3, "wall_clock_breakdown": false})",
      1);
  const std::string warning = translated.warning();
  for (const char* key :
       {"overlap_comm", "reduce_bucket_size", "my_own_key", "not a DeepSpeed key"}) {
    EXPECT_NE(warning.find(key), std::string::npos) << warning;
  }
  EXPECT_EQ(warning.find("stage"), std::string::npos);
  const TranslatedConfig alone = translate_deepspeed_config(
      R"({"tensor_parallel": {"autotp_size": 0, "preset_model": "llama"}})", 2);
  EXPECT_NE(alone.warning().find("no tensor ranks"), std::string::npos) << alone.warning();
  const std::string preset = R"({"tensor_parallel": {"autotp_size": 2, "preset_model": "llama")";
  const std::string own = translate_deepspeed_config(preset + "}}", 2).warning();
  EXPECT_NE(own.find("preset_model: without layer_specs"), std::string::npos) << own;
  const std::string specs = R"(, "partition_config": {"layer_specs": [{"patterns": ["a"]}]}}})";
  EXPECT_EQ(translate_deepspeed_config(preset + specs, 2).warning(), "");
  EXPECT_EQ(translate_deepspeed_config(R"({"zero_optimization": {"stage": 2}})", 1).warning(), "");
  const std::string monitor = R"({"wandb": {"enabled": true, "team": "a"}})";
  EXPECT_EQ(translate_deepspeed_config(monitor, 1).warning(), "");
}

TEST(DeepSpeedConfig, DialectsAreToldApart) {
  EXPECT_TRUE(is_deepspeed_config(R"({"zero_optimization": {"stage": 2}})"));
  EXPECT_TRUE(is_deepspeed_config(R"({"train_batch_size": 4})"));
  EXPECT_TRUE(is_deepspeed_config(R"({"optimizer": {"type": "Adam", "params": {}}})"));
  EXPECT_FALSE(is_deepspeed_config(R"({"strategy": "zero2", "optimizer": {"lr": 1}})"));
  EXPECT_FALSE(is_deepspeed_config(R"({"checkpoint": {"path": "x"}})"));
  EXPECT_FALSE(is_deepspeed_config("{}"));
  EXPECT_FALSE(is_deepspeed_config("not JSON"));
}

}  // namespace
}  // namespace penstock::deepspeed_config_test
