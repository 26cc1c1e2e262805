#include "src/ckpt/json.h"

#include <set>
#include <utility>
#include <vector>

#include "src/base/text.h"
#include "src/ckpt/damaged.h"

namespace penstock::ckpt {

namespace {

constexpr int kMaxDepth = 256;
constexpr size_t kMostShown = 200;

}  // namespace

Json parse_json(std::string_view text, const std::string& what) {
  // A repeated key is an error: the library keeps only the last value, but a different reader may
  // keep the first one.
  std::vector<std::set<std::string>> open;  // keys of the objects that are being read
  const auto watch = [&](int depth, Json::parse_event_t event, Json& value) {
    if (depth > kMaxDepth) throw Damaged(concat("[ckpt::json] ", what, " is nested too deeply"));
    if (event == Json::parse_event_t::object_start) open.emplace_back();
    if (event == Json::parse_event_t::object_end) open.pop_back();
    if (event == Json::parse_event_t::key && !open.back().insert(value.get<std::string>()).second)
      throw Damaged(concat("[ckpt::json] ", what, " has key ", value.dump(), " twice"));
    return true;
  };
  // The library treats a NUL as the end of the text and ignores the rest.
  if (text.find('\0') != std::string_view::npos) {
    throw Damaged(concat("[ckpt::json] ", what, " is not valid JSON: it has a NUL byte"));
  }
  try {
    return Json::parse(text, watch);
  } catch (const nlohmann::json::exception& error) {
    throw Damaged(concat("[ckpt::json] ", what, " is not valid JSON: ", printable(error.what())));
  }
}

std::string printable(std::string_view text) {
  std::string shown;
  for (const char one : text.substr(0, kMostShown)) {
    const auto byte = static_cast<unsigned char>(one);
    constexpr const char* kDigits = "0123456789abcdef";
    if (byte >= ' ' && byte < 0x7f) {
      shown += one;
    } else {
      shown += concat("\\x", kDigits[byte >> 4], kDigits[byte & 15]);
    }
  }
  return text.size() > kMostShown ? shown + "..." : shown;
}

std::string dump(const Json& json) {
  try {
    return json.dump();
  } catch (const nlohmann::json::exception& error) {
    throw ConfigError(
        concat("[ckpt::json] text that is not UTF-8 cannot be saved: ", error.what()));
  }
}

JsonReader::JsonReader(const Json& object, std::string what)
    : object_(object), what_(std::move(what)) {
  if (!object.is_object()) fail("not a JSON object");
}

void JsonReader::fail(const std::string& why) const {
  throw Damaged(concat("[ckpt::json] ", what_, ": ", why));
}

const Json& JsonReader::at(const std::string& key) const {
  const auto found = object_.find(key);
  if (found == object_.end()) fail(concat("\"", key, "\" is missing"));
  return *found;
}

const Json& JsonReader::list(const std::string& key) const {
  const Json& value = at(key);
  if (!value.is_array()) fail(concat("\"", key, "\" is not a list"));
  return value;
}

const Json& JsonReader::object(const std::string& key) const {
  const Json& value = at(key);
  if (!value.is_object()) fail(concat("\"", key, "\" is not an object"));
  return value;
}

std::string JsonReader::text(const std::string& key) const {
  const Json& value = at(key);
  if (!value.is_string()) fail(concat("\"", key, "\" is not a string"));
  return value.get<std::string>();
}

int64_t JsonReader::whole(const std::string& key, int64_t least, int64_t most) const {
  return number(at(key), least, most);
}

int64_t JsonReader::number(const Json& value, int64_t least, int64_t most) const {
  // Excludes fractions, and unsigned values that int64 cannot hold.
  const bool fits =
      value.is_number_integer() &&
      (!value.is_number_unsigned() || value.get<uint64_t>() <= static_cast<uint64_t>(INT64_MAX));
  if (!fits) fail(concat(value.dump(), " is not a whole number"));
  const auto number = value.get<int64_t>();
  if (number < least || number > most) {
    fail(concat(number, " is not in the range ", least, " to ", most));
  }
  return number;
}

}  // namespace penstock::ckpt
