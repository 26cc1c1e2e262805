// Saving and loading from C++, with ranks as threads: from one layout into another. Training must
// continue as if it had not been interrupted.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <map>
#include <string>

#include "penstock/checkpoint.h"
#include "penstock/checkpoint_files.h"
#include "penstock/engine.h"
#include "penstock/error.h"
#include "src/base/text.h"
#include "tests/ranks/thread_ranks.h"

namespace penstock::checkpoint_test {
namespace {

using ranks::build;
using ranks::loss_of;
using ranks::run_ranks;

constexpr std::chrono::seconds kTimeout{60};

struct Layout {
  const char* strategy;
  int world;
  const char* others;  // keys and values
};

std::ostream& operator<<(std::ostream& out, const Layout& layout) {
  return out << layout.strategy << " on " << layout.world << " " << layout.others;
}

class CheckpointTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = (std::filesystem::temp_directory_path() / "penstock-ranks-XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    root_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(root_); }

  // Runs `work` with an engine on each rank. No rank may fail.
  void on_ranks(const Layout& layout,
                const std::function<void(Engine&, ranks::NetImpl&, int)>& work) {
    std::vector<std::shared_ptr<ranks::NetImpl>> nets;
    for (int rank = 0; rank < layout.world; ++rank) nets.push_back(build());
    const Config config = Config::parse(concat(R"({"strategy": ")", layout.strategy,
                                               R"(", "units": {"modules": ["Block"]},
            "optimizer": {"type": "AdamW", "lr": 0.01, "eps": 1e-4})",
                                               layout.others, "}"));
    const auto errors = run_ranks(layout.world, kTimeout, [&](int rank, const auto& group) {
      Engine engine(nets[rank], config, group);
      work(engine, *nets[rank], rank);
      engine.close();
    });
    for (int rank = 0; rank < layout.world; ++rank) EXPECT_EQ(errors[rank], "") << rank;
  }

  static double step(Engine& engine, ranks::NetImpl& net, int number, int rank, int world) {
    const at::Tensor loss = engine.run([&] { return loss_of(net, {number, 0, rank, 1, world}); });
    engine.backward(loss);
    engine.step();
    return loss.item<double>();
  }

  std::string root_;
};

TEST_F(CheckpointTest, AnyLayoutIntoAnyOther) {
  const Layout layouts[] = {{"zero3", 2, ""},
                            {"ddp", 3, ""},
                            {"zero1", 1, R"(, "offload": {"optimizer": "host"})"},
                            {"zero3", 4, R"(, "offload": {"optimizer": "disk", "params": "disk"})"},

                            {"hpz", 4, R"(, "mesh": {"node": 2})"},
                            {"mics", 4, R"(, "mesh": {"node": 2})"},
                            // Last, because frozen parameters have no fp32 masters.
                            {"zero2", 2, R"(, "precision": "bf16")"}};
  std::map<std::string, at::Tensor> wanted;
  on_ranks(layouts[0], [&](Engine& engine, ranks::NetImpl& net, int rank) {
    for (int i = 0; i < 3; ++i) step(engine, net, i, rank, 2);
    EXPECT_EQ(engine.save(root_, "first", R"({"epoch":7})"), root_ + "/first");
    for (const auto& [name, value] : engine.state()) {
      if (rank == 0) wanted[name] = value;
    }
  });
  std::string from = "first";
  for (const Layout& layout : layouts) {
    const std::string to = from + "x";
    on_ranks(layout, [&](Engine& engine, ranks::NetImpl& net, int rank) {
      step(engine, net, 9, rank, layout.world);
      EXPECT_EQ(engine.load(root_, from), R"({"epoch":7})") << layout;
      for (const auto& [name, value] : engine.state()) {
        const bool low = layout.strategy == std::string("zero2");
        if (low && name.find("frozen") != std::string::npos) continue;
        EXPECT_TRUE(value.equal(wanted.at(name))) << layout << ": " << name;
      }
      engine.save(root_, to, R"({"epoch":7})", /*wait=*/false);
      step(engine, net, 3, rank, layout.world);
    });
    from = to;
  }
  CheckpointReader(root_ + "/" + from).verify();
}

TEST_F(CheckpointTest, GoesOnAsIfNothingHadHappened) {
  const Layout layout{"zero3", 2, R"(, "precision": "bf16")"};
  std::map<int, std::vector<double>> wanted, found;
  std::mutex mutex;
  const auto record = [&](std::map<int, std::vector<double>>& into, Engine& engine,
                          ranks::NetImpl& net, int rank) {
    for (int i = 3; i < 8; ++i) {
      const double loss = step(engine, net, i, rank, 2);
      const std::lock_guard lock(mutex);
      into[rank].push_back(loss);
    }
  };
  on_ranks(layout, [&](Engine& engine, ranks::NetImpl& net, int rank) {
    for (int i = 0; i < 3; ++i) step(engine, net, i, rank, 2);
    engine.save(root_);
    record(wanted, engine, net, rank);
  });
  on_ranks(layout, [&](Engine& engine, ranks::NetImpl& net, int rank) {
    engine.load(root_);
    record(found, engine, net, rank);
  });
  EXPECT_EQ(wanted, found);
}

TEST_F(CheckpointTest, ErrorsAreOnEveryRank) {
  on_ranks({"zero3", 2, ""}, [&](Engine& engine, ranks::NetImpl& net, int rank) {
    EXPECT_THROW(engine.load(root_), RuntimeFault);
    EXPECT_THROW(engine.save(root_, "", "{not json"), std::exception);
    EXPECT_THROW(engine.save(root_, concat("of-", rank)), ConfigError);
    EXPECT_THROW(engine.save("/proc/nowhere"), RuntimeFault);
    step(engine, net, 0, rank, 2);
    engine.save(root_);
    EXPECT_THROW(engine.load(root_, "other"), RuntimeFault);
    EXPECT_EQ(engine.load(root_), "null");
    step(engine, net, 0, rank, 2);
  });
}

}  // namespace
}  // namespace penstock::checkpoint_test
