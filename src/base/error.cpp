#include "penstock/error.h"

#include "src/base/text.h"

namespace penstock {

void raise_bug(const char* file, int line, const char* condition, const std::string& message) {
  throw Bug(concat("[", file, ":", line, "] ", message, " (broken: ", condition, ")"));
}

}  // namespace penstock
