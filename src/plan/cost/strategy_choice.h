#pragma once
// Choice of tiers: simulates every offload choice that a config leaves open, and sorts the choices,
// the best first. The functions are pure, so ranks with the same config, model and room choose
// alike.
#include <map>
#include <string>
#include <vector>

#include "penstock/plan.h"
#include "src/plan/model_desc.h"
#include "src/plan/table.h"

namespace penstock {

struct Question {
  PlanQuestion asked;  // only tiers that are "auto" are tried; all other tiers stay
  std::vector<std::string> strategies;
  bool external_optimizer = false;
  bool many = false;  // true: many questions follow, so predict_window() is used
  // The tiers of gradients that are tried. If empty, only the config's tier is tried, because the
  // tier "host" would round sums over several backwards, and the tier "disk" needs more I/O.
  std::vector<std::string> gradients{};
};

// Leaves every offload tier of the question open, so that all tiers are tried. Otherwise an answer
// without an alternative that fits does not mean that nothing fits.
void open_all(Question& question);

// Returns the alternatives that can run, the best first. They are sorted by missing bytes (0 if the
// alternative fits). If these are equal, alternatives that round sums come last (only if several
// tiers of gradients are tried), then tight alternatives come last. Ties are broken by seconds,
// then by disk, host and device bytes, then by the listed order.
std::vector<Alternative> alternatives(const Question& question, const ModelDesc& model);

// Returns the config with the alternative's strategy and tiers.
Config with(const Config& config, const Alternative& chosen);

std::string seconds_text(double seconds);  // three significant digits
// Returns a table with one line per alternative, with reasons.
std::string choice_text(const std::vector<Alternative>& alternatives);

// Returns why alternatives() is empty: the reason why the tiers that are not "auto" cannot run.
std::string refusal(const Question& question, const ModelDesc& model);

// Throws a ConfigError that says why `chosen` does not fit, and names the first of `others` that
// fits.
[[noreturn]] void refuse(const Alternative& chosen, const std::vector<Alternative>& others,
                         const Room& room);

// Returns a sentence for a run that exceeded its prediction. `bytes` is the resource that ran out.
// The sentence names the best alternative that needs less of it than `now`, and says what the
// prediction leaves out.
std::string advice(const Question& question, const ModelDesc& model, const OffloadConfig& now,
                   int64_t Alternative::* bytes);

}  // namespace penstock
