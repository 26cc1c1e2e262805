#pragma once
// DeepSpeed's config as ours: every key that DeepSpeed documents is taken over, has no effect
// (which a warning says), or is refused. Pure values; any thread. docs/deepspeed.md has the table.
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "penstock/export.h"

namespace penstock {

enum class KeyFate : uint8_t {
  kTaken,     // it is in the native config
  kNoEffect,  // what it tunes is not there; the result is the same
  kRefused,   // it would change what is trained, and is not supported: an error unless it is off
};

// A row of the table.
struct DeepSpeedKey {
  const char* key;  // "zero_optimization.stage"; "aio.*" for all of a section
  KeyFate fate;
  const char* note;  // the native key, or why
};
PENSTOCK_API std::span<const DeepSpeedKey> deepspeed_keys();

// A key that was given.
struct GivenKey {
  std::string key, value;  // JSON
  KeyFate fate = KeyFate::kTaken;
  std::string note;
};

struct PENSTOCK_API TranslatedConfig {
  std::string native;           // JSON, for Config::parse
  std::string scheduler;        // JSON of that section, which the front builds; empty where none
  std::vector<GivenKey> given;  // in their order

  // One text that lists what has no effect, and why; empty where everything is taken over.
  std::string warning() const;
};

// JSON that may have comments, without them. Throws ConfigError where it is none.
PENSTOCK_API std::string plain_json(const std::string& json_text);
// Whether it is DeepSpeed's dialect and not ours.
PENSTOCK_API bool is_deepspeed_config(const std::string& json_text);
// Throws ConfigError for values that DeepSpeed refuses, keys that its sections do not have, and
// what is not supported. `world`: number of ranks, for sizes that follow from it.
PENSTOCK_API TranslatedConfig translate_deepspeed_config(const std::string& json_text, int world);

// One of DeepSpeed's schedules of one parameter group. Iteration -1 is before the first step(),
// 0 after it, and so on.
struct PENSTOCK_API DeepSpeedSchedule {
  std::string type;  // "WarmupLR" "WarmupDecayLR" "WarmupCosineLR" "OneCycle" "LRRangeTest"
  std::map<std::string, double> params;  // flags are 0 and 1, warmup_type "log" 0 and "linear" 1

  // Every schedule's parameters with their defaults; NaN where there is none. WarmupCosineLR takes
  // the group's lr as "base_lr", and so does WarmupLR without a "warmup_max_lr".
  static const std::map<std::string, std::map<std::string, double>>& all();
  // Throws ConfigError for a type or a parameter that there is not, one that is missing, and
  // values that cannot work.
  static DeepSpeedSchedule make(const std::string& type,
                                const std::map<std::string, double>& params);

  double lr(int64_t iteration) const;
  double momentum(int64_t iteration) const;  // of OneCycle with cycle_momentum
};

}  // namespace penstock
