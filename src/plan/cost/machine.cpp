#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "penstock/error.h"
#include "penstock/plan.h"
#include "src/base/text.h"

namespace penstock {

namespace {

constexpr std::array<std::pair<const char*, double Machine::*>, 11> kFields = {
    {{"flops", &Machine::flops},
     {"local", &Machine::local},
     {"node", &Machine::node},
     {"device_host", &Machine::device_host},
     {"host_disk", &Machine::host_disk},
     {"host_memory", &Machine::host_memory},
     {"device_memory", &Machine::device_memory},
     {"overlap", &Machine::overlap},
     {"one_row", &Machine::one_row},
     {"rows_16", &Machine::rows_16},
     {"attention", &Machine::attention}}};

constexpr const char* kMake = "; `penstock bench` writes such a file";

[[noreturn]] void fail_machine(const std::string& path, const std::string& what) {
  throw ConfigError(concat("[plan::read_machine] ", path, what));
}

}  // namespace

// Rates must be above 0, since they are divisors. "overlap" is a share between 0 and 1.
Machine read_machine(const std::string& path, const Machine& otherwise) {
  std::ifstream file(path);
  if (!file) fail_machine(path, concat(" cannot be read: ", std::strerror(errno), kMake));
  if (std::filesystem::is_directory(path)) fail_machine(path, " is a folder");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  std::vector<std::set<std::string>> open;  // keys of the objects that are being read
  const auto watch = [&](int, nlohmann::json::parse_event_t event, nlohmann::json& value) {
    using Event = nlohmann::json::parse_event_t;
    if (event == Event::object_start) open.emplace_back();
    if (event == Event::object_end) open.pop_back();
    if (event == Event::key && !open.back().insert(value.get<std::string>()).second)
      fail_machine(path, concat(": the key ", value.dump(), " is given twice. Keep one of them"));
    return true;
  };
  const nlohmann::json json = nlohmann::json::parse(text, watch, false);
  // The library takes a NUL for the end of the text.
  if (json.is_discarded() || text.find('\0') != std::string::npos)
    fail_machine(path, concat(" is not JSON", kMake));
  if (!json.is_object()) fail_machine(path, concat(" is not a JSON object", kMake));
  Machine machine = otherwise;
  for (const auto& [key, value] : json.items()) {
    if (key == "about" || value.is_null()) continue;
    const auto* field = std::find_if(kFields.begin(), kFields.end(),
                                     [&](const auto& one) { return key == one.first; });
    if (field == kFields.end()) {
      std::vector<std::string> names;
      for (const auto& one : kFields) names.emplace_back(one.first);
      fail_machine(path,
                   concat(": unknown \"", key, "\"; allowed: ", join(names, ", "), ", about"));
    }
    const bool share = key == "overlap";
    const double number = value.is_number() ? value.get<double>() : -1.0;
    if (share ? number < 0.0 || number > 1.0 : !(number > 0.0)) {
      fail_machine(path,
                   concat(": \"", key, "\" is ", value.dump(), "; allowed: ",
                          share ? "a number from 0 to 1, or null" : "a number above 0, or null"));
    }
    machine.*(field->second) = number;
  }
  return machine;
}

}  // namespace penstock
