// Each *.plan file has a config in '#' lines and then the steps that it must give. To accept new
// plans, run with PENSTOCK_UPDATE_GOLDEN=1 and review the difference.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/plan/planner.h"
#include "src/plan/strategy.h"

namespace penstock::golden_test {
namespace {

// Read from a '#' line with the JSON of a config as users write it, and '# key = value' lines for
// values that are not in a config.
struct Case {
  Config config;
  int ranks = 8;
  int tensor = 1;       // number of tensor ranks
  int chunks = 1;       // of block1's optimizer state, which is too small to be split automatically
  std::string section;  // name of the section; empty: a whole step
  bool passes = false;  // whether the passes that the config enables are run
};

Case read_case(const std::string& text) {
  Case read;
  if (!text.starts_with("# {")) throw ConfigError("[golden] the first line is no '# {config}'");
  for (const std::string& line : split(text, '\n')) {
    if (!line.starts_with('#')) continue;
    const std::string setting(trim(std::string_view(line).substr(1)));
    if (setting.starts_with('{')) {
      read.config = Config::parse(setting);
      continue;
    }
    const size_t equals = setting.find(" = ");
    if (equals == std::string::npos) continue;
    const std::string key = setting.substr(0, equals), value = setting.substr(equals + 3);
    if (key == "section") {
      read.section = value;
    } else if (key == "passes") {
      read.passes = value == "yes";
    } else {
      std::map<std::string, int*> numbers = {
          {"ranks", &read.ranks}, {"tensor", &read.tensor}, {"chunks", &read.chunks}};
      if (!numbers.contains(key)) throw ConfigError(concat("[golden] unknown key '", key, "'"));
      *numbers[key] = std::stoi(value);
    }
  }
  return read;
}

// A root (for example embedding and head) and two blocks, the second with an fp32 flat.
ModelDesc small_model(const Config& config) {
  const Dtype dtype = parse_dtype(config.precision.value_or("bf16"));
  ModelDesc model;
  model.units = {{.name = "root", .flats = {{8192, dtype}}},
                 {.name = "block1", .flats = {{4096, dtype}}},
                 {.name = "block2", .flats = {{4096, dtype}, {512, Dtype::kFp32}}}};
  if (config.mesh.tensor > 1) {
    // One layer for the columns of a matrix, and one for the rows of the next matrix.
    model.units[1].in_backward = {{MoveKind::kAllReduce, Axis::kTensor}};
    model.units[2].in_forward = {{MoveKind::kAllReduce, Axis::kTensor}};
  }
  assume_order(model, true);
  mark_recomputed(config, model);
  return model;
}

Plan make_plan(Case one) {
  Config& config = one.config;
  config.mesh.tensor = one.tensor;
  config.resolve(one.ranks);
  const Mesh mesh = mesh_of(config);
  ModelDesc model = small_model(config);
  const Table table = table_of(config, model);
  set_chunks(config, table.on(mesh), model);
  if (one.chunks > 1) model.units[1].num_chunks = one.chunks;
  const Plan plan = one.section.empty()
                        ? plan_step(table, model, mesh, static_cast<int>(config.batch.accumulate))
                        : plan_section(table, model, mesh, section_named(one.section));
  return one.passes ? with_passes(plan, model, config) : plan;
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
  const Plan plan = make_plan(read_case(text.str()));
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
}  // namespace penstock::golden_test
