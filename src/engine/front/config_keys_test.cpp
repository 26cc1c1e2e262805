#include "src/engine/front/config_keys.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>
#include <nlohmann/json.hpp>

#include "penstock/error.h"

namespace penstock::engine {
namespace {

const ConfigKey* key_of(const std::string& path) {
  for (const ConfigKey& one : config_keys()) {
    if (path == one.path || path.starts_with(std::string(one.path) + "/")) return &one;
  }
  return nullptr;
}

std::string error_of(const std::string& text) {
  try {
    refuse_unread_keys(Config::parse(text));
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

TEST(ConfigKeys, EachKeyIsReadOrRefused) {
  const nlohmann::json all = nlohmann::json::parse(Config{}.json()).flatten();
  for (const auto& [path, value] : all.items()) {
    EXPECT_NE(key_of(path), nullptr) << path << " is not in src/engine/front/config_keys.cpp";
  }
  EXPECT_EQ(error_of("{}"), "");
}

struct KeyRow {
  const char* text;
  const char* key;
};

TEST(ConfigKeys, NamesTheKeyThatOnlyPythonReads) {
  const std::vector<KeyRow> rows = {
      {R"({"seed": 3})", "seed"},
      {R"({"checkpoint": {"path": "runs"}})", "checkpoint.path"},
      {R"({"monitor": {"console": "bar"}})", "monitor.console"},
      {R"({"monitor": {"path": "run", "formats": ["tensorboard"]}})", "monitor.formats.0"},
      {R"({"monitor": {"path": "run", "formats": ["jsonl", "wandb"]}})", "monitor.formats.1"},
      {R"({"mesh": {"sequence": 2}})", "mesh.sequence"},
      {R"({"activations": {"checkpoint": "unit"}})", "activations.checkpoint"},
      {R"({"offload": {"cache": "host"}})", "offload.cache"},
      {R"({"tiling": {"max_bytes": 4096}})", "tiling.max_bytes"},
      {R"({"tiling": {"loss_tokens": 8}})", "tiling.loss_tokens"},
      {R"({"comm": {"backend": "gloo"}})", "comm.backend"},
      {R"({"comm": {"timeout_s": 5}})", "comm.timeout_s"},
      {R"({"comm": {"warn_s": 5}})", "comm.warn_s"},
      {R"({"parallel": {"rules": {"a.*": "divide"}}})", "parallel.rules.a.*"},
      {R"({"parallel": {"rules": {"a": "column", "b": "row_tokens"}}})", "parallel.rules.b"},
      {R"({"mesh": {"tensor": 2}, "parallel": {"cut_logits": true}})", "parallel.cut_logits"},
      {R"({"mesh": {"tensor": 2}, "parallel": {"norms": "tokens"}})", "parallel.norms"},
      {R"({"mesh": {"tensor": 2}, "parallel": {"verify": "all"}})", "parallel.verify"},
  };
  for (const KeyRow& row : rows) {
    EXPECT_NE(error_of(row.text).find(std::string("\"") + row.key + "\""), std::string::npos)
        << row.text << ": " << error_of(row.text);
  }
}

TEST(ConfigKeys, TakesWhatItReads) {
  for (const char* text : {R"({"monitor": {"path": "run", "formats": ["csv", "jsonl"]}})",
                           R"({"mesh": {"tensor": 2}, "parallel": {"rules": {"a": "column:2"}}})",
                           R"({"mesh": {"tensor": 2}, "parallel": {"verify": "off"}})",
                           R"({"comm": {"report_dir": "reports", "bucket_bytes": 5}})",
                           R"({"seed": null, "comm": {"timeout_s": 600}})"}) {
    EXPECT_EQ(error_of(text), "") << text;
  }
}

}  // namespace
}  // namespace penstock::engine
