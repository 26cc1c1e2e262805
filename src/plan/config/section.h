#pragma once
// Reads a config's JSON: ConfigSection, which refuses unknown keys, and functions that throw the
// errors for bad values.
#include <algorithm>
#include <cctype>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <string>
#include <utility>
#include <vector>
#include <nlohmann/json.hpp>

#include "penstock/error.h"
#include "src/base/text.h"

namespace penstock::config_text {

using Json = nlohmann::ordered_json;  // keeps the order of `dtypes` rules

[[noreturn]] inline void fail(const std::string& message) {
  throw ConfigError("[plan::Config::parse] " + message);
}

[[noreturn]] inline void fail_value(const std::string& path, const Json& value,
                                    const std::string& allowed) {
  fail(concat("\"", path, "\" is ", value.dump(), "; allowed: ", allowed));
}

// Throws ConfigError for a valid value that this version does not support.
[[noreturn]] inline void fail_unsupported(const std::string& path, const Json& value,
                                          const std::string& sentence) {
  fail(concat("\"", path, "\" is ", value.dump(), "; ", sentence));
}

inline std::string quoted(const std::vector<std::string>& names) {
  return names.empty() ? "" : concat("\"", join(names, "\", \""), "\"");
}

inline std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

inline std::string suggestion(const std::string& prefix, const std::string& word,
                              const std::vector<std::string>& names) {
  std::string near = nearest(word, names);
  if (near.empty()) near = nearest(lower(word), names);
  return near.empty() ? "" : concat("; did you mean \"", prefix, near, "\"?");
}

// One JSON object of the config. It refuses unknown keys and returns typed values. A key that is
// absent or null keeps the default.
class ConfigSection {
 public:
  ConfigSection(const Json& object, std::string path, std::vector<std::string> keys)
      : object_(object), prefix_(path.empty() ? "" : path + "."), keys_(std::move(keys)) {
    if (!object.is_object())
      fail_value(path.empty() ? "config" : path, object, "an object {key: value}");
    std::sort(keys_.begin(), keys_.end());
    for (const auto& [key, value] : object.items()) {
      if (std::find(keys_.begin(), keys_.end(), key) != keys_.end()) continue;
      fail(concat("unknown key \"", prefix_, key, "\"", suggestion(prefix_, key, keys_),
                  path.empty() ? " (valid keys: " : concat(" (valid keys of \"", path, "\": "),
                  join(keys_, ", "), ")"));
    }
  }

  std::string path(const std::string& key) const { return prefix_ + key; }

  const Json* find(const std::string& key) const {
    const auto found = object_.find(key);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }

  bool has(const std::string& key) const { return find(key) != nullptr; }

  void read(const std::string& key, double* out, double low, double high,
            const std::string& allowed) const {
    const Json* value = find(key);
    if (value == nullptr) return;
    if (!value->is_number()) fail_value(path(key), *value, allowed);
    const double number = value->get<double>();
    if (!(number >= low && number <= high)) fail_value(path(key), *value, allowed);
    *out = number;
  }

  // Reads a whole number. It may be written as 1e9.
  template <class Int>
  void read_int(const std::string& key, Int* out, int64_t low, const std::string& allowed) const {
    const Json* value = find(key);
    if (value == nullptr) return;
    const double limit = std::min(0x1p53, static_cast<double>(std::numeric_limits<Int>::max()));
    const double number = value->is_number() ? value->get<double>() : NAN;
    if (!(number >= static_cast<double>(low) && number <= limit) || number != std::floor(number))
      fail_value(path(key), *value, allowed);
    *out = static_cast<Int>(number);
  }

  // Reads bytes, as a number or as text with a unit. `note` follows the allowed values in errors.
  void read_bytes(const std::string& key, int64_t* out, int64_t low = 1,
                  const std::string& note = "") const {
    const std::string allowed =
        concat("a whole number of bytes >= ", low, ", or text such as \"4GiB\"", note);
    const Json* value = find(key);
    if (value == nullptr) return;
    if (!value->is_string()) return read_int(key, out, low, allowed);
    const std::optional<int64_t> bytes = parse_bytes(value->get<std::string>());
    if (bytes.value_or(-1) < low) fail_value(path(key), *value, allowed);
    *out = *bytes;
  }

  void read(const std::string& key, bool* out) const {
    const Json* value = find(key);
    if (value == nullptr) return;
    if (!value->is_boolean()) fail_value(path(key), *value, "true or false");
    *out = value->get<bool>();
  }

  void read_text(const std::string& key, std::string* out) const {
    const Json* value = find(key);
    if (value == nullptr) return;
    if (!value->is_string()) fail_value(path(key), *value, "text");
    *out = value->get<std::string>();
  }

  // Returns the key's value, which must be exactly one of `names`.
  std::string choice(const std::string& key, const std::string& otherwise,
                     const std::vector<std::string>& names) const {
    const Json* value = find(key);
    if (value == nullptr) return otherwise;
    return choice_of(path(key), *value, names);
  }

  static std::string choice_of(const std::string& path, const Json& value,
                               const std::vector<std::string>& names) {
    const std::string text = value.is_string() ? value.get<std::string>() : "";
    if (std::find(names.begin(), names.end(), text) == names.end())
      fail_value(path, value, quoted(names) + suggestion("", text, names));
    return text;
  }

  // Throws ConfigError if one of these keys is set, except to 0, false or "": these values request
  // no effect.
  void refuse_without_effect(std::initializer_list<const char*> keys,
                             const std::string& reason) const {
    for (const char* key : keys) {
      const Json* value = find(key);
      if (value == nullptr || *value == 0 || *value == false || *value == "") continue;
      fail(concat("\"", path(key), "\" is ", value->dump(), ", which has no effect ", reason,
                  "; leave it out"));
    }
  }

 private:
  const Json& object_;
  std::string prefix_;
  std::vector<std::string> keys_;
};

}  // namespace penstock::config_text
