#pragma once
// Translation of DeepSpeed's config. Every key that DeepSpeed documents is translated, refused, or
// listed in a warning because it has no effect. Plain values, usable from any thread.
// docs/deepspeed.md has the table.
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "penstock/export.h"

namespace penstock {

enum class KeyFate : uint8_t {
  kTaken,     // translated to a native key
  kNoEffect,  // the mechanism that it tunes does not exist here; results are the same
  kRefused,   // changes training and is not supported: an error unless it is off
};

// One row of the table of keys.
struct DeepSpeedKey {
  const char* key;  // "zero_optimization.stage"; "aio.*" for a whole section
  KeyFate fate;
  const char* note;  // the native key, or the reason
};
PENSTOCK_API std::span<const DeepSpeedKey> deepspeed_keys();

// A key of the given config.
struct GivenKey {
  std::string key, value;  // JSON
  KeyFate fate = KeyFate::kTaken;
  std::string note;
};

struct PENSTOCK_API TranslatedConfig {
  std::string native;           // JSON, for Config::parse
  std::string values;           // JSON: the config with each value as DeepSpeed reads it
  std::string scheduler;        // JSON of the "scheduler" section, for the front; empty if absent
  std::vector<GivenKey> given;  // in the order of the text
  // Keys that are still "auto" although DeepSpeed needs numbers for them. Their defaults apply.
  std::vector<std::string> left_over;

  // Returns one text that lists the keys without effect, with reasons; empty if there are none.
  std::string warning() const;
};

// Removes comments from JSON text. Throws ConfigError if the text is not JSON.
PENSTOCK_API std::string plain_json(const std::string& json_text);
// Returns whether the text is in DeepSpeed's dialect and not in the native one.
PENSTOCK_API bool is_deepspeed_config(const std::string& json_text);
// Throws ConfigError for values that DeepSpeed refuses, for keys that its sections do not have, and
// for unsupported settings. `world`: number of ranks, from which batch sizes follow.
PENSTOCK_API TranslatedConfig translate_deepspeed_config(const std::string& json_text, int world);

// One of DeepSpeed's schedules for one parameter group. Iteration -1 is before the first step(),
// iteration 0 after it, and so on.
struct PENSTOCK_API DeepSpeedSchedule {
  std::string type;  // "WarmupLR" "WarmupDecayLR" "WarmupCosineLR" "OneCycle" "LRRangeTest"
  std::map<std::string, double>
      params;  // flags are 0 or 1; warmup_type is 0 ("log") or 1 ("linear")

  // Returns the parameters of every schedule with their defaults; NaN = no default. The group's lr
  // is passed as "base_lr" to WarmupCosineLR, and to WarmupLR if "warmup_max_lr" is absent.
  static const std::map<std::string, std::map<std::string, double>>& all();
  // Throws ConfigError for an unknown type or parameter, for a missing parameter, and for values
  // that cannot work.
  static DeepSpeedSchedule make(const std::string& type,
                                const std::map<std::string, double>& params);

  double lr(int64_t iteration) const;
  double momentum(int64_t iteration) const;  // only OneCycle with cycle_momentum
};

}  // namespace penstock
