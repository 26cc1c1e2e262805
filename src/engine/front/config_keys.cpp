#include "src/engine/front/config_keys.h"

#include <algorithm>
#include <array>
#include <string>
#include <nlohmann/json.hpp>

#include "penstock/error.h"
#include "src/base/text.h"

namespace penstock::engine {

namespace {

constexpr const char* kGroup = "pass it to the Group (penstock/group.h)";
constexpr const char* kPython = "only the Python front has it";
constexpr auto kKeys = std::to_array<ConfigKey>({
    {"/strategy", nullptr},
    {"/table", nullptr},
    {"/precision", nullptr},
    {"/clip", nullptr},
    {"/nonfinite", nullptr},
    {"/inference", nullptr},
    {"/prefetch_bytes", nullptr},
    {"/seed", "call torch::manual_seed() on each rank"},
    {"/dtypes", nullptr},
    {"/checkpoint/path", "pass the path to save() and load()"},
    {"/checkpoint/keep", nullptr},
    {"/checkpoint/signals", "call save() in the training loop after the signal"},
    {"/monitor/console", "print Engine::metrics()"},
    {"/monitor/formats", "the C++ front writes \"jsonl\" and \"csv\""},
    {"/monitor", nullptr},
    {"/optimizer", nullptr},
    {"/schedule", nullptr},
    {"/mesh/sequence", kPython},
    {"/mesh", nullptr},
    {"/offload/cache", kPython},
    {"/offload", nullptr},
    {"/memory", nullptr},
    {"/quantize/cache", kPython},
    {"/quantize", nullptr},
    {"/activations/checkpoint", "the C++ front cannot recompute units; set it to \"none\""},
    {"/loss_scale", nullptr},
    {"/batch", nullptr},
    {"/units", nullptr},
    {"/tiling", kPython},
    {"/comm/backend", "make the Group from the process group that you want"},
    {"/comm/codec", "only the Python front has \"local\""},
    {"/comm/timeout_s", kGroup},
    {"/comm/warn_s", kGroup},
    {"/comm", nullptr},
    {"/parallel/rules",
     "only the Python front has the styles \"divide\", \"tokens\", \"gather_tokens\" and "
     "\"row_tokens\""},
    {"/parallel/cut_logits", kPython},
    {"/parallel/norms", kPython},
    {"/parallel/sequence", kPython},
    {"/parallel/verify", kPython},
    {"/parallel", nullptr},
});

bool is_below(const std::string& path, const std::string& key) {
  return path == key || path.starts_with(key + "/");
}

// Returns whether the C++ front reads this value, although it does not read the key's other values.
bool is_read(const std::string& key, const nlohmann::json& value) {
  const std::string text = value.is_string() ? value.get<std::string>() : "";
  if (key == "/monitor/formats") return text == "jsonl" || text == "csv" || value.empty();
  if (key == "/comm/codec") return text != "local";
  if (key == "/parallel/verify") return text == "off";
  if (key != "/parallel/rules") return false;
  const std::string style = text.substr(0, text.find(':'));
  return style != "divide" && style != "tokens" && style != "gather_tokens" &&
         style != "row_tokens";
}

}  // namespace

std::span<const ConfigKey> config_keys() { return kKeys; }

void refuse_unread_keys(const Config& config) {
  const nlohmann::json given = nlohmann::json::parse(config.json()).flatten();
  const nlohmann::json defaults = nlohmann::json::parse(Config{}.json()).flatten();
  for (const auto& [path, value] : given.items()) {
    const std::string& at = path;
    const auto key = std::find_if(kKeys.begin(), kKeys.end(),
                                  [&](const ConfigKey& one) { return is_below(at, one.path); });
    if (key == kKeys.end() || key->remedy == nullptr || is_read(key->path, value)) continue;
    if (defaults.contains(path) && defaults[path] == value) continue;
    std::string name = path.substr(1);
    std::replace(name.begin(), name.end(), '/', '.');
    throw ConfigError(concat("[engine::Engine] the C++ front does not read \"", name, "\" (",
                             value.dump(), "): ", key->remedy));
  }
}

}  // namespace penstock::engine
