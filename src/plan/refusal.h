#pragma once
// refusal(): for tests.
#include <functional>
#include <string>

#include "penstock/error.h"

namespace penstock {

// What the ConfigError says that the call throws; "" for none.
inline std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

}  // namespace penstock
