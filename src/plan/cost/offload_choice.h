#pragma once
// Which tiers to use: every offload choice that a config leaves open, simulated, best first. Pure,
// so ranks that agree on the config, the model and the room choose alike.
#include <map>
#include <string>
#include <vector>

#include "penstock/plan.h"
#include "src/plan/model_desc.h"
#include "src/plan/table.h"

namespace penstock {

struct Question {
  PlanQuestion asked;  // its config's offload tiers that are "auto" are tried, the others stay
  std::vector<std::string> strategies;
  bool external_optimizer = false;
  bool many = false;  // are asked: predict_window() instead of predict()
};

// Those that can be run. Best first: what fits with room to spare, then what fits, then what lacks
// least; of these the fastest; then what takes least of the disk, the host, the device; then as
// listed.
std::vector<Alternative> alternatives(const Question& question, const ModelDesc& model);

// The config with the alternative's strategy and tiers.
Config with(const Config& config, const Alternative& chosen);

// One line each, and why.
std::string choice_text(const std::vector<Alternative>& alternatives);

// Why alternatives() has none: what the tiers that are not open ask for cannot be.
std::string refusal(const Question& question, const ModelDesc& model);

// Throws ConfigError: where `chosen` does not fit, and the first of `others` that does.
[[noreturn]] void refuse(const Alternative& chosen, const std::vector<Alternative>& others,
                         const Room& room);

// What would take less than `now` of the bytes that ran out: the best of the alternatives that do,
// as a sentence.
std::string advice(const Question& question, const ModelDesc& model, const OffloadConfig& now,
                   int64_t Alternative::* bytes);

}  // namespace penstock
