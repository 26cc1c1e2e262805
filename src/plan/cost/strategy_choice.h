#pragma once
// Choice of tiers: simulates every offload choice that a config leaves open, and returns the best
// first. Pure, so ranks that agree on the config, the model and the room choose alike.
#include <map>
#include <string>
#include <vector>

#include "penstock/plan.h"
#include "src/plan/model_desc.h"
#include "src/plan/table.h"

namespace penstock {

struct Question {
  PlanQuestion asked;  // its offload tiers that are "auto" are tried; the others stay
  std::vector<std::string> strategies;
  bool external_optimizer = false;
  bool many = false;  // many questions follow: uses predict_window() instead of predict()
};

// Returns the alternatives that can run, best first: those that fit with room to spare, then those
// that fit, then by the bytes that are missing. Ties: the fastest, then the least disk, host and
// device memory, then the listed order.
std::vector<Alternative> alternatives(const Question& question, const ModelDesc& model);

// Returns the config with the alternative's strategy and tiers.
Config with(const Config& config, const Alternative& chosen);

// One line per alternative, with reasons.
std::string choice_text(const std::vector<Alternative>& alternatives);

// Returns a reason why alternatives() is empty: why the tiers that are not "auto" cannot run.
std::string refusal(const Question& question, const ModelDesc& model);

// Throws ConfigError that says why `chosen` does not fit, and names the first of `others` that
// does.
[[noreturn]] void refuse(const Alternative& chosen, const std::vector<Alternative>& others,
                         const Room& room);

// Returns a sentence that names the best alternative that needs less than `now` of the bytes that
// ran out.
std::string advice(const Question& question, const ModelDesc& model, const OffloadConfig& now,
                   int64_t Alternative::* bytes);

}  // namespace penstock
