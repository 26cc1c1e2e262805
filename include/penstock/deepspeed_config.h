#pragma once
// DeepSpeed's config as ours: every key that DeepSpeed documents is taken over, has no effect
// (which a warning says), or is refused. Pure values; any thread. docs/deepspeed.md has the table.
#include <cstdint>
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
  std::vector<GivenKey> given;  // in their order

  // One text that lists what has no effect, and why; empty where everything is taken over.
  std::string warning() const;
};

// Whether it is DeepSpeed's dialect and not ours.
PENSTOCK_API bool is_deepspeed_config(const std::string& json_text);
// Throws ConfigError for values that DeepSpeed refuses, keys that its sections do not have, and
// what is not supported. `world`: number of ranks, for sizes that follow from it.
PENSTOCK_API TranslatedConfig translate_deepspeed_config(const std::string& json_text, int world);

}  // namespace penstock
