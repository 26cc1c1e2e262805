#pragma once
// The config keys that the C++ front reads. All other keys are implemented only by the Python
// front. Without a check, the C++ front would silently ignore them.
#include <span>

#include "penstock/config.h"

namespace penstock::engine {

struct ConfigKey {
  const char* path;    // "/comm/timeout_s"; a prefix stands for all keys below it
  const char* remedy;  // what to do in C++ instead; null: the C++ front reads the key
};

// Every key of Config::json(), by path.
std::span<const ConfigKey> config_keys();

// Throws ConfigError with key, value and remedy if a key of `config` that only the Python front
// reads does not have its default value.
void refuse_unread_keys(const Config& config);

}  // namespace penstock::engine
