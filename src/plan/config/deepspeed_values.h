#pragma once
// Reads the values of a DeepSpeed config as DeepSpeed's own parser (0.19.8) does: the same values
// are accepted, converted or refused. Plain functions, usable from any thread.
#include <string>
#include <vector>
#include <nlohmann/json.hpp>

namespace penstock {

// Throws ConfigError with the text "[plan::deepspeed_config] ...".
[[noreturn]] void fail_deepspeed(const std::string& message);

struct DeepSpeedValues {
  nlohmann::ordered_json config;         // without keys set to "auto"; values have the keys' types
  std::vector<std::string> auto_keys{};  // keys that were "auto" and so get DeepSpeed's default
  std::vector<std::string> left_over{};  // keys whose "auto" makes DeepSpeed fail
};

// Throws ConfigError for a value of the wrong type or range, and for an unknown key in a section
// that has a fixed set of keys.
DeepSpeedValues read_deepspeed_values(const nlohmann::ordered_json& config);

}  // namespace penstock
