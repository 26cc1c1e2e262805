#pragma once
// Parses JSON that another program may have written. On an unexpected value, the functions throw
// Damaged with the location of the value.
#include <cstdint>
#include <string>
#include <string_view>
#include <nlohmann/json.hpp>

namespace penstock::ckpt {

using Json = nlohmann::ordered_json;  // keeps the order of the users' keys

// Throws Damaged if the text is not JSON, repeats a key, or is nested more than 256 levels deep.
Json parse_json(std::string_view text, const std::string& what);
// Returns the text in a form for messages: in ASCII (other bytes become \xNN), and cut to 200
// characters.
std::string printable(std::string_view text);
// Returns the JSON on one line. Throws ConfigError for text that is not UTF-8.
std::string dump(const Json& json);

// Reads the fields of an object. Every function throws Damaged if a field is missing or has the
// wrong type.
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
