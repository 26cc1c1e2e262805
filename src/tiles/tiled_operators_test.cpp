// Compares the tiled operators with torch's on the whole weight, with a host that records calls.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/tiles/tiling.h"
#include "src/tiles/weights.h"

namespace penstock::tiles {
namespace {

class Notes : public Host {
 public:
  void enter_tile(int unit) override { events += concat(" +", unit); }
  void leave_tile(int unit, Mark in_backward) override {
    events += concat(" -", unit, in_backward == Mark::kGradient ? "g" : "");
  }
  bool begin_tile_backward(bool /*uses*/) override { return takes_gradients; }
  void take_tile_gradient(int unit, const at::Tensor& gradient) override {
    gradients.emplace(unit, gradient);
  }
  void run_in_backward(const std::function<void()>& work) override { work(); }

  std::string events;
  std::map<int, at::Tensor> gradients;
  bool takes_gradients = true;
};

// A weight of 7 x 4 in tiles of 2, 2 and 3 rows; their units are 1 to 3.
class OperatorsTest : public testing::Test {
 protected:
  OperatorsTest() {
    torch::manual_seed(1);
    weight_ = torch::randn({7, 4}).set_requires_grad(true);
    std::vector<TiledWeight> weights(1);
    TiledWeight& one = weights.front();
    one.name = "w";
    one.whole = weight_.detach().set_requires_grad(true);
    one.first = {0, 2, 4, 7};
    one.trainable = true;
    std::vector<std::string> units = {"the root"};
    for (size_t tile = 0; tile < 3; ++tile) {
      one.tiles.push_back(weight_.detach().narrow(0, one.first[tile], one.rows(tile)).clone());
      units.push_back(one.tile_name(tile));
    }
    weights_ = std::make_shared<TiledWeights>(notes_, std::move(weights), units);
  }

  Tiles tiles(int64_t loss_tokens = 2) const { return {weights_, "w", loss_tokens}; }

  void expect_gradient_of_whole() const {
    ASSERT_EQ(notes_.gradients.size(), 3u);
    for (const auto& [unit, gradient] : notes_.gradients) {
      const TiledWeight& one = weights_->at(0);
      EXPECT_TRUE(torch::allclose(
          gradient, weight_.grad().narrow(0, one.first[unit - 1], one.rows(unit - 1)), 1e-5, 1e-6))
          << "unit " << unit;
    }
  }

  at::Tensor weight_;
  Notes notes_;
  std::shared_ptr<TiledWeights> weights_;
};

TEST_F(OperatorsTest, LinearIsThatOfTheWhole) {
  const at::Tensor input = torch::randn({5, 4}).set_requires_grad(true);
  const at::Tensor same = input.detach().clone().set_requires_grad(true);
  const at::Tensor ours = tiles().linear(input, {}), theirs = torch::linear(same, weight_);
  EXPECT_TRUE(torch::allclose(ours, theirs));
  EXPECT_EQ(notes_.events, " +1 -1 +2 -2 +3 -3");
  notes_.events.clear();
  ours.square().sum().backward();
  theirs.square().sum().backward();
  EXPECT_EQ(notes_.events, " +3 -3 +2 -2 +1 -1");
  EXPECT_TRUE(torch::allclose(input.grad(), same.grad(), 1e-5, 1e-6));
  expect_gradient_of_whole();
}

TEST_F(OperatorsTest, EmbeddingNeedsNoWeightInBackward) {
  const at::Tensor ids = torch::tensor({6, 0, 3, 6, 2});
  const at::Tensor ours = tiles().embedding(ids, -1, false);
  const at::Tensor theirs = torch::embedding(weight_, ids);
  EXPECT_TRUE(torch::equal(ours, theirs));
  notes_.events.clear();
  ours.square().sum().backward();
  theirs.square().sum().backward();
  EXPECT_EQ(notes_.events, " -3g -2g -1g");
  expect_gradient_of_whole();
}

TEST_F(OperatorsTest, CrossEntropyNeedsNoWholeLogits) {
  const at::Tensor input = torch::randn({5, 4}), target = torch::tensor({6, 0, -100, 3, 2});
  const at::Tensor ours = tiles().cross_entropy(input, {}, target, {}, at::kFloat);
  const at::Tensor theirs =
      torch::nn::functional::cross_entropy(torch::linear(input, weight_), target);
  EXPECT_TRUE(torch::allclose(ours, theirs, 1e-5, 1e-6));
  ours.backward();
  theirs.backward();
  expect_gradient_of_whole();
}

TEST_F(OperatorsTest, WhatHasNoGradientOrNoEngineIsRefused) {
  const at::Tensor input = torch::randn({5, 4}).set_requires_grad(true);
  const Tiles tiles = this->tiles();
  const at::Tensor loss = tiles.linear(input, {}).sum();
  EXPECT_THROW(loss.backward({}, true, true), RuntimeFault);  // create_graph
  notes_.takes_gradients = false;
  EXPECT_THROW(loss.backward({}, true), RuntimeFault);
  weights_->close();
  EXPECT_THROW(tiles.linear(input, {}), RuntimeFault);
  EXPECT_THROW((Tiles{weights_, "v", 1}), ConfigError);
}

TEST_F(OperatorsTest, WholeValuesAndTheirRows) {
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  const std::map<int, at::Tensor> rows = weights_->whole_values(true, at::kFloat, &tensors);
  for (const auto& [unit, part] : rows) part.fill_(unit);
  EXPECT_EQ(tensors.at(0).second.select(1, 0).sum().item<double>(), 1 * 2 + 2 * 2 + 3 * 3);
  std::map<std::string, at::Tensor> by_name = {{"w", tensors[0].second}, {"v", torch::ones({1})}};
  weights_->split_rows(by_name);
  EXPECT_EQ(by_name.size(), 4u);
  EXPECT_TRUE(torch::equal(by_name.at("w[4:7]"), torch::full({3, 4}, 3.0)));
  by_name = {{"w", torch::ones({7})}};
  EXPECT_THROW(weights_->split_rows(by_name), ConfigError);
}

}  // namespace
}  // namespace penstock::tiles
