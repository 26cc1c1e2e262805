#pragma once
// For tests: the text of a ConfigError.
#include <functional>
#include <string>

#include "penstock/error.h"

namespace penstock {

// Returns the text of the ConfigError that the call throws; "" if it throws none.
inline std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

}  // namespace penstock
