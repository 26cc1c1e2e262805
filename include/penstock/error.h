#pragma once
// The three kinds of error (docs/errors.md). A text begins with "[layer::function] "; the text of
// PENSTOCK_ASSERT begins with "[file:line] ".
#include <stdexcept>
#include <string>

#include "penstock/export.h"

namespace penstock {

// A setting that cannot work. The text names the key, its value, the allowed values and the fix.
class PENSTOCK_API ConfigError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// A failure outside the program, for example of I/O, a peer or memory. The text names rank, path,
// step and bytes.
class PENSTOCK_API RuntimeFault : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A broken invariant of the engine.
class PENSTOCK_API Bug : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

[[noreturn]] PENSTOCK_API void raise_bug(const char* file, int line, const char* condition,
                                         const std::string& message);

}  // namespace penstock

#define PENSTOCK_ASSERT(condition, message)                                             \
  do {                                                                                  \
    if (!(condition)) ::penstock::raise_bug(__FILE__, __LINE__, #condition, (message)); \
  } while (false)
