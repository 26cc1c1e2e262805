#pragma once
// Reading JSON that others may have written: every surprise is a Damaged that says where.
#include <cstdint>
#include <string>
#include <string_view>
#include <nlohmann/json.hpp>

namespace penstock::ckpt {

using Json = nlohmann::ordered_json;  // what users put in keeps its order

// Throws Damaged for what is no JSON, for a key that is given twice, and for more than 256 levels.
Json parse_json(std::string_view text, const std::string& what);
// On one line. Throws ConfigError for text that is no UTF-8.
std::string dump(const Json& json);

// An object's fields. Every function throws Damaged where a field is missing or is of another kind.
class JsonReader {
 public:
  JsonReader(const Json& object, std::string what);

  [[noreturn]] void fail(const std::string& why) const;
  const Json& at(const std::string& key) const;
  const Json& list(const std::string& key) const;
  const Json& object(const std::string& key) const;
  std::string text(const std::string& key) const;
  int64_t whole(const std::string& key, int64_t least, int64_t most) const;
  int64_t number(const Json& value, int64_t least, int64_t most) const;

 private:
  const Json& object_;
  const std::string what_;
};

}  // namespace penstock::ckpt
