#include "src/plan/config/deepspeed_values.h"

#include <gtest/gtest.h>

#include <string>

#include "penstock/deepspeed_config.h"
#include "penstock/error.h"

namespace penstock::deepspeed_values_test {
namespace {

using Json = nlohmann::ordered_json;

struct Read {
  const char* given;
  const char* read;  // the config as it is read; nullptr if it is refused
};

// One flag, whole number, number, text, choice and list of each kind of section. The results are
// those of DeepSpeed 0.19.8.
constexpr Read kCases[] = {
    // a flag in a pydantic section
    {R"({"bf16": {"enabled": 1}})", R"({"bf16": {"enabled": true}})"},
    {R"({"bf16": {"enabled": 0.0}})", R"({"bf16": {"enabled": false}})"},
    {R"({"bf16": {"enabled": "Yes"}})", R"({"bf16": {"enabled": true}})"},
    {R"({"bf16": {"enabled": "off"}})", R"({"bf16": {"enabled": false}})"},
    {R"({"bf16": {"enabled": "auto"}})", R"({"bf16": {}})"},
    {R"({"bf16": {"enabled": 2}})", nullptr},
    {R"({"bf16": {"enabled": " true"}})", nullptr},
    {R"({"bf16": {"enabled": null}})", nullptr},
    {R"({"bf16": {"enabled": []}})", nullptr},
    // a whole number in a pydantic section
    {R"({"zero_optimization": {"stage": "2"}})", R"({"zero_optimization": {"stage": 2}})"},
    {R"({"zero_optimization": {"stage": 2.0}})", R"({"zero_optimization": {"stage": 2}})"},
    {R"({"zero_optimization": {"stage": true}})", R"({"zero_optimization": {"stage": 1}})"},
    {R"({"zero_optimization": {"stage": " +1_0.00 "}})", nullptr},  // 10
    {R"({"zero_optimization": {"sub_group_size": " +1_0.00 "}})",
     R"({"zero_optimization": {"sub_group_size": 10}})"},
    {R"({"zero_optimization": {"sub_group_size": 1e8}})",
     R"({"zero_optimization": {"sub_group_size": 100000000}})"},
    {R"({"zero_optimization": {"sub_group_size": 9223372036854775807}})",
     R"({"zero_optimization": {"sub_group_size": 9223372036854775807}})"},
    {R"({"zero_optimization": {"sub_group_size": "1e8"}})", nullptr},
    {R"({"zero_optimization": {"sub_group_size": "1__0"}})", nullptr},
    {R"({"zero_optimization": {"sub_group_size": "1."}})", nullptr},
    {R"({"zero_optimization": {"sub_group_size": "0x10"}})", nullptr},
    {R"({"zero_optimization": {"sub_group_size": ""}})", nullptr},
    {R"({"zero_optimization": {"sub_group_size": 3686.4}})", nullptr},
    {R"({"zero_optimization": {"sub_group_size": -1}})", nullptr},
    {R"({"zero_optimization": {"sub_group_size": null}})", nullptr},
    {R"({"fp16": {"loss_scale_window": "10"}})", R"({"fp16": {"loss_scale_window": 10}})"},
    {R"({"fp16": {"loss_scale_window": "10.0"}})", nullptr},
    {R"({"fp16": {"loss_scale_window": true}})", nullptr},
    // a number in a pydantic section
    {R"({"fp16": {"loss_scale": "1e2"}})", R"({"fp16": {"loss_scale": 100.0}})"},
    {R"({"fp16": {"loss_scale": ".5"}})", R"({"fp16": {"loss_scale": 0.5}})"},
    {R"({"fp16": {"loss_scale": "inf"}})", nullptr},
    {R"({"fp16": {"loss_scale": "nan"}})", nullptr},
    {R"({"fp16": {"loss_scale": "0x1p3"}})", nullptr},
    {R"({"fp16": {"loss_scale": false}})", nullptr},
    {R"({"fp16": {"loss_scale": -1}})", nullptr},
    // texts, choices and lists in a pydantic section
    {R"({"wandb": {"team": null}})", R"({"wandb": {}})"},
    {R"({"wandb": {"project": null}})", nullptr},
    {R"({"wandb": {"project": 3}})", nullptr},
    {R"({"zero_optimization": {"offload_param": {"device": "CPU"}}})", nullptr},
    {R"({"zero_optimization": {"leaf_module": {"names": "a"}}})",
     R"({"zero_optimization": {"leaf_module": {"names": ["a"]}}})"},
    {R"({"zero_optimization": {"leaf_module": {"names": [3]}}})", nullptr},
    {R"({"comms_logger": {"prof_ops": "all_reduce"}})", nullptr},
    // keys of a pydantic section
    {R"({"zero_optimization": {"max_live_parameters": 1}})",
     R"({"zero_optimization": {"stage3_max_live_parameters": 1}})"},
    {R"({"zero_optimization": {"max_live_parameters": 1, "stage3_max_live_parameters": 1}})",
     nullptr},
    {R"({"zero_optimization": {"max_live_parameters": 1, "stage3_max_live_parameters": "auto"}})",
     R"({"zero_optimization": {"stage3_max_live_parameters": 1}})"},
    {R"({"zero_optimization": {"offload_param": {"buffer_sise": 1}}})", nullptr},
    {R"({"timers": {"throughput": {"x": 1}}})", nullptr},
    // values in a dict section
    {R"({"train_batch_size": 16.0})", R"({"train_batch_size": 16})"},
    {R"({"train_batch_size": null})", "{}"},
    {R"({"train_batch_size": "auto"})", "{}"},
    {R"({"train_batch_size": "16"})", nullptr},
    {R"({"train_batch_size": 0})", nullptr},
    {R"({"gradient_clipping": "1.0"})", nullptr},
    {R"({"gradient_clipping": null})", nullptr},
    {R"({"wall_clock_breakdown": 1})", R"({"wall_clock_breakdown": true})"},
    {R"({"wall_clock_breakdown": "true"})", nullptr},
    {R"({"communication_data_type": "FP16"})", R"({"communication_data_type": "fp16"})"},
    {R"({"communication_data_type": "fp64"})", nullptr},
    {R"({"steps_per_print": "often"})", R"({"steps_per_print": "often"})"},
    {R"({"optimizer": {"params": {"lr": "auto"}}})", R"({"optimizer": {"params": {}}})"},
    // sections
    {R"({"optimizer": null})", nullptr},
    {R"({"optimizer": []})", nullptr},
    {R"({"fp16": true})", nullptr},
    {R"({"fp16": null})", nullptr},
    {R"({"bf16": null})", "{}"},
    {R"({"zero_optimization": {"offload_param": null}})", R"({"zero_optimization": {}})"},
    // a key with a dot is an ordinary name
    {R"({"zero_optimization.stage": 7.5})", R"({"zero_optimization.stage": 7.5})"},
};

TEST(DeepSpeedValues, ValuesAreReadAsByDeepSpeed) {
  for (const Read& one : kCases) {
    try {
      const Json read = read_deepspeed_values(Json::parse(one.given)).config;
      if (one.read == nullptr) {
        ADD_FAILURE() << one.given << " was read as " << read;
      } else {
        EXPECT_EQ(read.dump(), Json::parse(one.read).dump()) << one.given;
      }
    } catch (const ConfigError& error) {
      EXPECT_EQ(one.read, nullptr) << one.given << ": " << error.what();
    }
  }
}

TEST(DeepSpeedValues, ErrorsSayWhatIsAllowed) {
  const Read cases[] = {
      {R"({"zero_optimization": {"stage3_prefetch_bucket_size": 3686.4}})",
       "\"zero_optimization.stage3_prefetch_bucket_size\" is 3686.4; allowed: a whole number of at "
       "least 0"},
      {R"({"zero_optimization": {"stage": 4}})", "allowed: a whole number from 0 to 3"},
      {R"({"fp16": {"enabled": "maybe"}})",
       "\"fp16.enabled\" is \"maybe\"; allowed: true or false"},
      {R"({"gradient_allreduce_op": "max"})",
       R"(Invalid gradient_allreduce_op: "gradient_allreduce_op" is "max"; allowed: "mean",)"},
      {R"({"fp16": {"loss_scale": {}}})",
       "\"fp16.loss_scale\" is {}; it must be a number of at least 0"},
      {R"({"checkpoint": {"tag_validation": 3}})", R"(allowed: "ignore", "warn", "fail")"},
      {R"({"aio": 3})", "\"aio\" is 3; allowed: a section {key: value}; or leave it out"},
      {R"({"bf16": {"enable": true}})",
       "unknown key \"bf16.enable\"; did you mean \"bf16.enabled\"?"},
      {R"({"zero_optimization": {"allgather_sequential": true,
          "stage3_allgather_sequential": true}})",
       R"(are the same key: keep only "zero_optimization.stage3_allgather_sequential")"},
  };
  for (const Read& one : cases) {
    try {
      read_deepspeed_values(Json::parse(one.given));
      ADD_FAILURE() << one.given;
    } catch (const ConfigError& error) {
      EXPECT_NE(std::string(error.what()).find(one.read), std::string::npos) << error.what();
    }
  }
}

TEST(DeepSpeedValues, LeftOverAutosAreListed) {
  const DeepSpeedValues values = read_deepspeed_values(Json::parse(
      R"({"train_batch_size": "auto", "zero_optimization": {"reduce_bucket_size": "auto"},
          "steps_per_print": "auto", "scheduler": {"params": {"total_num_steps": "auto"}}})"));
  EXPECT_EQ(values.auto_keys, std::vector<std::string>{"zero_optimization.reduce_bucket_size"});
  EXPECT_EQ(values.left_over,
            (std::vector<std::string>{"train_batch_size", "scheduler.params.total_num_steps"}));
}

}  // namespace
}  // namespace penstock::deepspeed_values_test
