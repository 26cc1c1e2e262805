// Each *.plan file: a configuration in '#' lines, then the steps it must give. To accept new plans,
// run with PENSTOCK_UPDATE_GOLDEN=1 and read the difference.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/plan/passes.h"
#include "src/plan/planner.h"

namespace penstock {
namespace {

using Config = std::map<std::string, std::string>;

// "# key = value" lines over these defaults.
Config read_config(const std::string& text) {
  Config config = {{"strategy", ""},       {"precision", "bf16"}, {"optim", "device"},
                   {"param", "device"},    {"act", "device"},     {"node", "2"},
                   {"grad", "device"},     {"local", "4"},        {"tensor", "1"},
                   {"micro", "1"},         {"section", ""},       {"read_ahead", ""},
                   {"prefetch_bytes", ""}, {"bucket_bytes", ""},  {"chunks", "1"}};
  for (const std::string& line : split(text, '\n')) {
    const size_t equals = line.find('=');
    if (!line.starts_with('#') || equals == std::string::npos) continue;
    const std::string key(trim(std::string_view(line).substr(1, equals - 1)));
    if (!config.contains(key)) throw ConfigError(concat("[golden] unknown key '", key, "'"));
    config[key] = trim(std::string_view(line).substr(equals + 1));
  }
  return config;
}

// A root (say embedding and head) and two blocks, the second with an fp32 part.
ModelDesc small_model(const Mesh& mesh) {
  ModelDesc model;
  model.units = {{.name = "root", .flats = {{8192, Dtype::kBf16}}},
                 {.name = "block1", .flats = {{4096, Dtype::kBf16}}},
                 {.name = "block2", .flats = {{4096, Dtype::kBf16}, {512, Dtype::kFp32}}}};
  if (mesh.tensor > 1) {
    model.units[1].split = TensorSplit::kColumn;
    model.units[2].split = TensorSplit::kRow;
  }
  assume_order(model, true);
  return model;
}

Section find_section(const std::string& name) {
  for (int i = 0; i <= static_cast<int>(Section::kUpdateEarly); ++i)
    if (name == section_name(static_cast<Section>(i))) return static_cast<Section>(i);
  throw ConfigError(concat("[golden] unknown section '", name, "'"));
}

Plan make_plan(const Config& config) {
  const auto number = [&](const char* key) { return std::stoi(config.at(key)); };
  const Mesh mesh{number("node"), number("local"), number("tensor")};
  const Table table =
      preset(config.at("strategy"), {.precision = parse_dtype(config.at("precision")),
                                     .accumulate = number("micro") > 1,
                                     .optim_tier = parse_tier(config.at("optim")),
                                     .param_tier = parse_tier(config.at("param")),
                                     .grads_on_disk = config.at("grad") == "disk",
                                     .act_tier = parse_tier(config.at("act"))});
  ModelDesc model = small_model(mesh);
  for (size_t unit = 1; unit < model.units.size(); ++unit)
    model.units[unit].recomputed = table.moves_activations();
  model.units[1].num_chunks = number("chunks");
  Plan plan = config.at("section").empty()
                  ? plan_step(table, model, mesh, number("micro"))
                  : plan_section(table, model, mesh, find_section(config.at("section")));
  if (!config.at("read_ahead").empty()) plan = read_ahead(plan);
  if (!config.at("bucket_bytes").empty()) plan = fuse(plan, model, number("bucket_bytes"));
  if (!config.at("prefetch_bytes").empty()) plan = prefetch(plan, model, number("prefetch_bytes"));
  return plan;
}

std::string header(const std::string& text) {
  std::string lines;
  for (const std::string& line : split(text, '\n'))
    if (line.starts_with('#')) lines += concat(line, "\n");
  return lines;
}

std::vector<std::string> golden_names() {
  std::vector<std::string> names;
  for (const auto& file : std::filesystem::directory_iterator(PENSTOCK_SOURCE_DIR "/tests/plans"))
    if (file.path().extension() == ".plan") names.push_back(file.path().stem().string());
  std::sort(names.begin(), names.end());
  return names;
}

class GoldenTest : public testing::TestWithParam<std::string> {};

TEST_P(GoldenTest, ConfigurationGivesTheseSteps) {
  const std::string path = concat(PENSTOCK_SOURCE_DIR "/tests/plans/", GetParam(), ".plan");
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  const Plan plan = make_plan(read_config(text.str()));
  if (std::getenv("PENSTOCK_UPDATE_GOLDEN") != nullptr)
    std::ofstream(path) << header(text.str()) << plan.text();
  else
    EXPECT_EQ(plan.text(), parse_plan(text.str()).text());
  EXPECT_EQ(parse_plan(plan.text()), plan);
}

INSTANTIATE_TEST_SUITE_P(Plans, GoldenTest, testing::ValuesIn(golden_names()),
                         [](const testing::TestParamInfo<std::string>& info) {
                           return info.param;
                         });

}  // namespace
}  // namespace penstock
