// Stages of a pipeline in a program without Python: 32 ranks (stages x tensor ranks x replicas)
// train the same model as one rank.
#include <gtest/gtest.h>

#include "penstock/engine.h"
#include "penstock/error.h"
#include "src/base/text.h"
#include "tests/ranks/thread_ranks.h"

namespace penstock::pipeline_test {
namespace {

constexpr int64_t kInner = 16, kOuter = 12, kTokens = 10;
constexpr int kSteps = 20;

struct PairImpl : torch::nn::Module {
  PairImpl() {
    up = register_module("up", torch::nn::Linear(kOuter, kInner));
    down = register_module("down", torch::nn::Linear(kInner, kOuter));
    count = register_buffer("count", torch::zeros({}));
  }
  torch::Tensor forward(const torch::Tensor& x, const torch::Tensor& scale) {
    if (is_training()) count.add_(1);
    return x + linear(*down, torch::gelu(linear(*up, x))) * scale;
  }
  torch::nn::Linear up{nullptr}, down{nullptr};
  torch::Tensor count;
};
TORCH_MODULE(Pair);

// Computes logits with the embedding's weight.
struct HeadImpl : torch::nn::Module {
  explicit HeadImpl(const torch::Tensor& tied) {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kOuter})));
    weight = register_parameter("weight", tied);
  }
  torch::nn::LayerNorm norm{nullptr};
  torch::Tensor weight;
};
TORCH_MODULE(Head);

// An embedding, blocks that all get the embedding's output, and a tied head.
struct ChainImpl : torch::nn::Module {
  ChainImpl() {
    torch::manual_seed(5);
    embed = register_module("embed", torch::nn::Embedding(kTokens, kOuter));
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (int i = 0; i < 8; ++i) blocks->push_back(Pair());
    head = register_module("head", Head(embed->weight));
  }

  torch::Tensor forward(const torch::Tensor& ids) {
    using Tensors = std::vector<torch::Tensor>;
    auto x =
        unit(*embed, {ids}, [&](const Tensors& in) { return torch::relu(embed->forward(in[0])); });
    const auto first = x;
    for (const auto& block : *blocks) {
      auto& pair = *block->as<Pair>();
      x = unit(pair, {x, first}, [&](const Tensors& in) { return pair.forward(in[0], in[1]); });
    }
    const auto logits = unit(
        *head, {x}, [&](const Tensors& in) { return head->norm(in[0]).matmul(head->weight.t()); });
    return torch::nn::functional::cross_entropy(logits.flatten(0, 1), ids.roll(1, 1).flatten());
  }

  torch::nn::Embedding embed{nullptr};
  torch::nn::ModuleList blocks{nullptr};
  Head head{nullptr};
};

struct Shape {
  const char* strategy;
  int pipeline, tensor, data, micro;
  const char* schedule = "1f1b";
  int virtual_stages = 1;
};

Config config_of(const Shape& shape) {
  return Config::parse(
      concat(R"({"strategy": ")", shape.strategy, R"(", "mesh": {"tensor": )", shape.tensor,
             R"(, "pipeline": )", shape.pipeline, R"(}, "batch": {"accumulate": )", shape.micro,
             R"(}, "optimizer": {"type": "AdamW", "lr": 0.01, "eps": 1e-4}, "clip": 0.5,
          "units": {"modules": ["Pair", "Head"], "layer_bytes": 1}, "parallel": {"schedule": ")",
             shape.schedule, R"(", "virtual_stages": )", shape.virtual_stages,
             R"(, "rules": {"blocks.*.up": "column", "blocks.*.down": "row"}}})"));
}

// Returns the tokens of one data rank for one micro-batch.
torch::Tensor rows_of(int step, int data, int micro) {
  const int first = 31 * step + 7 * data + 3 * micro;
  return torch::arange(first, first + 2 * 5).view({2, 5}).square().remainder(kTokens);
}

struct Trained {
  std::vector<std::pair<std::string, at::Tensor>> weights;
  std::vector<double> losses;
  double norm = 0.0, evaluated = 0.0;
};

// `replicas`: if not 1, this one rank takes the samples of that many data ranks in turn.
Trained train(const std::shared_ptr<ChainImpl>& model, const Shape& shape, int replicas,
              const std::shared_ptr<Group>& group) {
  Engine engine(model, config_of(shape), group);
  Trained run;
  const auto loss_of = [&](int step) {
    return [&, step](int i) {
      const int data = replicas == 1 ? engine.data_rank() : i % replicas;
      return model->forward(rows_of(step, data, i / replicas));
    };
  };
  for (int step = 0; step < kSteps; ++step) {
    run.losses.push_back(engine.train_batch(loss_of(step)));
    run.norm = engine.grad_norm();
  }
  run.evaluated = engine.eval_batch(loss_of(kSteps));
  run.weights = engine.state();
  engine.close();
  return run;
}

class PipelineMeshes : public testing::TestWithParam<Shape> {};

TEST_P(PipelineMeshes, TrainAsOneRank) {
  const Shape& shape = GetParam();
  const int world = shape.pipeline * shape.tensor * shape.data;
  const Shape one{"ddp", 1, 1, 1, shape.micro * shape.data};
  const auto alone = std::make_shared<ChainImpl>();
  const Trained plain = train(alone, one, shape.data, Group::alone());
  std::vector<std::shared_ptr<ChainImpl>> models;
  for (int rank = 0; rank < world; ++rank) models.push_back(std::make_shared<ChainImpl>());
  std::vector<Trained> runs(static_cast<size_t>(world));
  const auto errors = ranks::run_ranks(
      world, std::chrono::seconds(90),
      [&](int rank, const auto& group) { runs[rank] = train(models[rank], shape, 1, group); });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
  for (int rank = 0; rank < world; ++rank) {
    EXPECT_EQ(runs[rank].norm, runs[0].norm);
    ASSERT_EQ(runs[rank].weights.size(), plain.weights.size());
    for (size_t i = 0; i < plain.weights.size(); ++i) {
      const auto& [name, value] = runs[rank].weights[i];
      EXPECT_TRUE(value.equal(runs[0].weights[i].second)) << name << " on rank " << rank;
    }
    const auto params = models[rank]->named_parameters();  // as close() left them
    for (const auto& item : alone->named_parameters()) {
      EXPECT_LT((params[item.key()] - item.value()).abs().max().item<double>(), 1e-5) << item.key();
    }
    for (const auto& item : models[rank]->named_buffers()) {
      EXPECT_EQ(item.value().item<double>(), kSteps * shape.micro) << item.key();
    }
    for (int step = 0; step < kSteps; ++step) {
      EXPECT_NEAR(runs[rank].losses[step], plain.losses[step], 1e-5);
    }
    EXPECT_NEAR(runs[rank].evaluated, plain.evaluated, 1e-5);
  }
  EXPECT_NEAR(runs[0].norm, plain.norm, 1e-5 * plain.norm);
}

INSTANTIATE_TEST_SUITE_P(All, PipelineMeshes,
                         testing::Values(Shape{"ddp", 2, 1, 1, 3}, Shape{"zero1", 2, 1, 2, 2},
                                         Shape{"zero2", 4, 1, 2, 4, "gpipe"},
                                         Shape{"zero3", 2, 2, 2, 2},
                                         Shape{"zero3", 2, 1, 2, 4, "interleaved", 2},
                                         Shape{"zero1", 4, 4, 2, 4}, Shape{"zero3", 4, 4, 2, 5},
                                         Shape{"zero1", 2, 1, 2, 3, "zero_bubble"},
                                         Shape{"zero3", 4, 1, 2, 5, "zero_bubble"}));

std::vector<std::string> two_ranks(
    const std::function<void(Engine& engine, ChainImpl& model)>& use) {
  std::vector<std::shared_ptr<ChainImpl>> models;
  for (int rank = 0; rank < 2; ++rank) models.push_back(std::make_shared<ChainImpl>());
  return ranks::run_ranks(2, std::chrono::seconds(20), [&](int rank, const auto& group) {
    Engine engine(models[rank], config_of({"ddp", 2, 1, 1, 2}), group);
    use(engine, *models[rank]);
  });
}

TEST(PipelineStages, SayWhatTheyAreNotGiven) {
  const auto run = two_ranks([](Engine& engine, ChainImpl& model) {
    engine.run([&] { return model.forward(rows_of(0, 0, 0)); });
  });
  for (const std::string& error : run)
    EXPECT_NE(error.find("call train_batch()"), std::string::npos);

  const auto units = two_ranks([](Engine& engine, ChainImpl& model) {
    engine.train_batch([&](int) { return unit(*model.embed, [&] { return torch::zeros({}); }); });
  });
  for (const std::string& error : units)
    EXPECT_NE(error.find("pass its inputs to unit()"), std::string::npos);

  // A skip connection whose tensor is not an input of the previous stage.
  const auto skips = two_ranks([](Engine& engine, ChainImpl& model) {
    engine.train_batch([&](int i) {
      using Tensors = std::vector<torch::Tensor>;
      auto x = unit(*model.embed, {rows_of(0, 0, i)},
                    [&](const Tensors& in) { return model.embed->forward(in[0]); });
      const auto first = x;
      for (const auto& block : *model.blocks) {
        auto& pair = *block->as<Pair>();
        x = unit(pair, {x}, [&](const Tensors& in) { return pair.forward(in[0], in[0]); });
      }
      return unit(*model.head, {x, first},
                  [&](const Tensors& in) { return (in[0] * in[1]).sum(); });
    });
  });
  EXPECT_NE(concat(skips[0], skips[1])
                .find("\"head\" is called in stage 1 with a tensor that only an earlier"),
            std::string::npos)
      << skips[0] << skips[1];
}

}  // namespace
}  // namespace penstock::pipeline_test
