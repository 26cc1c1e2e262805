#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <fstream>

#include "penstock/error.h"
#include "penstock/plan.h"
#include "src/base/text.h"

namespace penstock::machine_test {
namespace {

struct File {
  explicit File(const std::string& text) { std::ofstream(path) << text; }
  ~File() { std::filesystem::remove(path); }
  const std::string path = testing::TempDir() + "penstock_machine_test.json";
};

TEST(Machine, WhatTheFileHasCounts) {
  const File file(R"({"flops": 2e11, "node": null, "overlap": 0, "about": {"host": "here"}})");
  const Machine machine = read_machine(file.path, Machine::cpu());
  EXPECT_EQ(machine.flops, 2e11);
  EXPECT_EQ(machine.node, Machine::cpu().node);
  EXPECT_EQ(machine.overlap, 0.0);
  EXPECT_EQ(machine.host_disk, Machine::cpu().host_disk);
}

TEST(Machine, WhatIsRefused) {
  const std::vector<std::pair<const char*, const char*>> cases = {
      {"[1]", "is not a JSON object"},
      {"{", "is not JSON"},
      {R"({"flop": 1})", "unknown \"flop\""},
      {R"({"flops": 1, "flops": 2})", "the key \"flops\" is given twice"},
      {R"({"about": {"x": 1, "x": 2}})", "the key \"x\" is given twice"},
      {R"({"flops": 0})", "\"flops\" is 0; allowed: a number above 0"},
      {R"({"local": "fast"})", "\"local\" is \"fast\""},
      {R"({"overlap": 1.5})", "allowed: a number from 0 to 1"}};
  for (const auto& [text, expected] : cases) {
    const File file(text);
    try {
      read_machine(file.path, Machine());
      FAIL() << text;
    } catch (const ConfigError& error) {
      EXPECT_NE(std::string(error.what()).find(expected), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find(file.path), std::string::npos) << error.what();
    }
  }
  EXPECT_THROW(read_machine("/nowhere/machine.json", Machine()), ConfigError);
}

}  // namespace
}  // namespace penstock::machine_test
