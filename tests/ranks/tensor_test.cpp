// Ranks that compute one model together, in a program without Python: 32 of them train the same
// model as one rank.
#include <gtest/gtest.h>

#include "penstock/engine.h"
#include "penstock/error.h"
#include "src/base/text.h"
#include "tests/ranks/thread_ranks.h"

namespace penstock::tensor_test {
namespace {

constexpr int64_t kInner = 16, kOuter = 12, kTokens = 10, kSteps = 20;

// An embedding, blocks with a column layer and a row layer, and a head.
struct StackImpl : torch::nn::Module {
  StackImpl() {
    torch::manual_seed(5);
    embed = register_module("embed", torch::nn::Embedding(kTokens, kOuter));
    for (int i = 0; i < 3; ++i) {
      ups->push_back(torch::nn::Linear(kOuter, kInner));
      downs->push_back(torch::nn::Linear(kInner, kOuter));
    }
    register_module("ups", ups);
    register_module("downs", downs);
    head = register_module("head", torch::nn::Linear(kOuter, kTokens));
  }

  torch::Tensor forward(const torch::Tensor& ids) {
    auto x = embedding(*embed, ids);
    for (size_t i = 0; i < ups->size(); ++i) {
      const auto& up = *ups->ptr<torch::nn::LinearImpl>(i);
      const auto& down = *downs->ptr<torch::nn::LinearImpl>(i);
      x = x + linear(down, torch::gelu(linear(up, x)));
    }
    const auto logits = calls_head ? linear(*head, x) : x.matmul(head->weight.t());
    return torch::nn::functional::cross_entropy(logits.flatten(0, 1), ids.roll(1, 1).flatten());
  }

  bool calls_head = true;
  torch::nn::Embedding embed{nullptr};
  torch::nn::ModuleList ups, downs;
  torch::nn::Linear head{nullptr};
};

Config config_of(const char* strategy, int tensor) {
  return Config::parse(
      concat(R"({"strategy": ")", strategy, R"(", "mesh": {"tensor": )", tensor,
             R"(}, "optimizer": {"type": "AdamW", "lr": 0.01, "eps": 1e-4}, "clip": 0.5,
          "parallel": {"rules": {"embed": "vocab", "ups.*": "column", "downs.*": "row",
                                 "head": "vocab"}}})"));
}

torch::Tensor rows_of(int step, int first, int count, int world) {
  const auto all = torch::arange(step, step + 2 * world * 7).view({2 * world, 7}).square();
  return all.remainder(kTokens).narrow(0, 2 * first, 2 * count);
}

struct Trained {
  std::vector<std::pair<std::string, at::Tensor>> weights;
  double norm = 0.0;
};

Trained train(const std::shared_ptr<StackImpl>& model, const Config& config, int first, int count,
              int world, const std::shared_ptr<Group>& group) {
  Engine engine(model, config, group);
  Trained run;
  for (int step = 0; step < kSteps; ++step) {
    const auto ids = rows_of(step, first, count, world);
    engine.backward(engine.run([&] { return model->forward(ids); }));
    engine.step();
    run.norm = engine.grad_norm();
  }
  run.weights = engine.state();
  engine.close();
  return run;
}

class Meshes : public testing::TestWithParam<std::tuple<const char*, int, int>> {};

TEST_P(Meshes, TrainAsOneRank) {
  const auto& [strategy, world, tensor] = GetParam();
  const int data = world / tensor;
  const Trained plain =
      train(std::make_shared<StackImpl>(), config_of("ddp", 1), 0, data, data, Group::alone());
  std::vector<std::shared_ptr<StackImpl>> models;
  for (int rank = 0; rank < world; ++rank) models.push_back(std::make_shared<StackImpl>());
  std::vector<Trained> runs(static_cast<size_t>(world));
  const auto errors =
      ranks::run_ranks(world, std::chrono::seconds(60), [&](int rank, const auto& group) {
        runs[rank] =
            train(models[rank], config_of(strategy, tensor), rank / tensor, 1, data, group);
      });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
  for (int rank = 0; rank < world; ++rank) {
    EXPECT_EQ(runs[rank].norm, runs[0].norm);
    ASSERT_EQ(runs[rank].weights.size(), plain.weights.size());
    for (size_t i = 0; i < plain.weights.size(); ++i) {
      const auto& [name, value] = runs[rank].weights[i];
      EXPECT_TRUE(value.equal(runs[0].weights[i].second)) << name << " on rank " << rank;
    }
    for (const auto& item : models[rank]->named_parameters()) {  // as close() left them
      for (const auto& [name, value] : plain.weights) {
        if (name != item.key()) continue;
        EXPECT_LT((item.value() - value).abs().max().item<double>(), 1e-5) << name;
      }
    }
  }
  EXPECT_NEAR(runs[0].norm, plain.norm, 1e-5 * plain.norm);
}

INSTANTIATE_TEST_SUITE_P(All, Meshes,
                         testing::Values(std::tuple{"zero3", 4, 2}, std::tuple{"zero2", 6, 2},
                                         std::tuple{"ddp", 4, 4}, std::tuple{"zero1", 32, 4}));

// A cut layer that is not called is refused. Code that reads its weight would take the rank's part
// for the full weight.
TEST(CutLayers, AreCalled) {
  std::vector<std::shared_ptr<StackImpl>> models;
  for (int rank = 0; rank < 2; ++rank) {
    models.push_back(std::make_shared<StackImpl>());
    models.back()->calls_head = false;
  }
  const auto errors =
      ranks::run_ranks(2, std::chrono::seconds(20), [&](int rank, const auto& group) {
        Engine engine(models[rank], config_of("ddp", 2), group);
        const auto ids = rows_of(0, 0, 1, 1).remainder(5);
        engine.backward(engine.run([&] { return models[rank]->forward(ids); }));
        engine.step();
      });
  for (const std::string& error : errors) {
    EXPECT_NE(error.find("cut module \"head\", which was not called"), std::string::npos) << error;
  }
}

}  // namespace
}  // namespace penstock::tensor_test
