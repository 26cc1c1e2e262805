// The C++ front's reports on a run: rows of all ranks, files, and a trace of both ranks.
#include <unistd.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "penstock/engine.h"
#include "src/base/text.h"
#include "tests/ranks/thread_ranks.h"

namespace penstock::metrics_test {
namespace {

constexpr std::chrono::seconds kTimeout{60};
constexpr int kSteps = 4;

std::string read(const std::filesystem::path& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

class Folder {
 public:
  Folder() : path_(std::filesystem::temp_directory_path() / concat("penstock-", getpid())) {}
  ~Folder() { std::filesystem::remove_all(path_); }
  const std::filesystem::path& path() const { return path_; }

 private:
  const std::filesystem::path path_;
};

TEST(Metrics, OfTheCppFront) {
  const Folder folder;
  const Config config = Config::parse(
      concat(R"({"strategy": "zero3", "optimizer": {"type": "SGD", "lr": 0.1},)",
             R"( "units": {"modules": ["Block"]}, "monitor": {"path": ")", folder.path().string(),
             R"(", "formats": ["csv", "jsonl"], "trace_first": 2, "trace_steps": 2, "machine": ")",
             folder.path().string(), R"(/machine.json"}})"));
  std::filesystem::create_directory(folder.path());
  std::ofstream(folder.path() / "machine.json") << R"({"flops": 1e9, "local": 1e9})";
  std::vector<std::shared_ptr<ranks::NetImpl>> nets = {ranks::build(), ranks::build()};
  std::vector<std::vector<double>> losses(2), told(2);
  const auto errors = ranks::run_ranks(2, kTimeout, [&](int rank, const auto& group) {
    Engine engine(nets[rank], config, group);
    for (int step = 0; step < kSteps; ++step) {
      engine.metrics().count(ranks::kRows, 10);
      const at::Tensor loss =
          engine.run([&] { return ranks::loss_of(*nets[rank], {step, 0, rank, 1, 2}); });
      losses[rank].push_back(loss.item().toDouble());
      engine.backward(loss);
      engine.step();
      const StepMetrics& last = engine.metrics().last();
      told[rank].push_back(last.loss);
      EXPECT_EQ(last.step, step + 1);
      EXPECT_EQ(last.samples, 2 * ranks::kRows);
      EXPECT_EQ(last.tokens, 20);
      EXPECT_EQ(last.grad_norm, engine.grad_norm());
      EXPECT_EQ(last.lr, 0.1);
      EXPECT_GT(last.comm_bytes, 0);
      EXPECT_TRUE(std::isnan(last.mfu()));
      if (last.step != 3) continue;
      engine.metrics().trace((folder.path() / "more.json").string(), 1, [rank](int64_t offset_ns) {
        EXPECT_EQ(offset_ns, 0);
        return rank == 0 ? "" : R"({"ph":"M","name":"more of rank 1","pid":1,"tid":99})";
      });
    }
    engine.metrics().flush();
    engine.close();
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
  EXPECT_EQ(told[0], told[1]);
  for (int step = 0; step < kSteps; ++step) {
    EXPECT_NEAR(told[0][step], (losses[0][step] + losses[1][step]) / 2, 1e-7);
  }
  EXPECT_EQ(split(read(folder.path() / "metrics.csv"), '\n').size(), kSteps + 2U);
  EXPECT_EQ(split(read(folder.path() / "metrics.jsonl"), '\n').size(), kSteps + 1U);
  const std::string trace = read(folder.path() / "trace.json");
  for (const char* part : {"\"rank 0 on ", "\"rank 1 on ", "forward u1 (blocks.0)", "\"gather\"",
                           "\"step\":2", "\"step\":3"}) {
    EXPECT_NE(trace.find(part), std::string::npos) << part;
  }
  EXPECT_EQ(trace.find("\"step\":4"), std::string::npos);
  EXPECT_NE(trace.find("\"predicted_ms\":"), std::string::npos);
  const std::string more = read(folder.path() / "more.json");
  EXPECT_NE(more.find("\"step\":4"), std::string::npos);
  EXPECT_NE(more.find("more of rank 1"), std::string::npos);
  for (const char* part : {"\"strategy\": \"zero3\"", "\"step_s\":"}) {
    EXPECT_NE(read(folder.path() / "run.json").find(part), std::string::npos) << part;
  }
}

}  // namespace
}  // namespace penstock::metrics_test
