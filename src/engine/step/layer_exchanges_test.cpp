#include "src/engine/step/layer_exchanges.h"

#include <gtest/gtest.h>

namespace penstock::engine {
namespace {

constexpr LayerExchange kSum = {MoveKind::kAllReduce, Axis::kTensor, 100};
constexpr LayerExchange kGather = {MoveKind::kAllGather, Axis::kTensor, 30};
constexpr LayerExchange kTokens = {MoveKind::kAllToAll, Axis::kSequence, 7};
using List = std::vector<LayerExchange>;

std::vector<std::string> only_mine(const std::string&, const std::string& text) { return {text}; }

// Three units, of which unit 2 has a module with a label of its own.
class LayerExchangesTest : public testing::Test {
 protected:
  void forward(const List& of_module, const List& others = {}, int computing = 1) {
    exchanges_.begin_forward();
    add(Op::kForward, of_module, others, computing);
  }
  void backward(const List& of_module, const List& others = {}, int computing = 1) {
    exchanges_.begin_backward();
    add(Op::kBackward, of_module, others, computing);
  }
  void add(Op pass, const List& of_module, const List& others, int computing) {
    for (const LayerExchange& one : of_module) exchanges_.add(pass, module_, computing, one);
    for (const LayerExchange& one : others) exchanges_.add(pass, other_, computing, one);
  }
  ModelDesc planned() {
    ModelDesc model;
    for (int unit = 0; unit < 3; ++unit) model.units.push_back({"u", {{512}}});
    exchanges_.put_into(model);
    return model;
  }
  bool says(const std::string& part) { return exchanges_.text().find(part) != std::string::npos; }

  comm::Label module_{"row (layer)"}, other_{"tokens for heads"};
  LayerExchanges exchanges_{3, {{module_.text.get(), 2}}, false};
};

TEST_F(LayerExchangesTest, BelongToTheModulesUnitOrToTheOneThatComputes) {
  forward({kSum, kGather}, {kTokens});
  backward({kSum}, {kTokens, kTokens}, 0);
  EXPECT_TRUE(exchanges_.recording());
  EXPECT_TRUE(planned().units[2].in_forward.empty());
  EXPECT_TRUE(says("known after step one"));
  exchanges_.agree(only_mine);
  const ModelDesc model = planned();
  EXPECT_EQ(model.units[2].in_forward, (List{kSum, kGather}));
  EXPECT_EQ(model.units[1].in_forward, List{kTokens});
  EXPECT_EQ(model.units[2].in_backward, List{kSum});
  EXPECT_EQ(model.units[0].in_backward, (List{kTokens, kTokens}));
  EXPECT_TRUE(says("3 exchanges of 137 B in forward, 3 exchanges of 114 B in backward"));
}

TEST_F(LayerExchangesTest, TheLastMicroBatchCounts) {
  forward({kSum});
  backward({kSum});
  forward({kSum, kGather});
  backward({kGather});
  exchanges_.agree(only_mine);
  EXPECT_EQ(planned().units[2].in_forward, (List{kSum, kGather}));
  EXPECT_EQ(planned().units[2].in_backward, List{kGather});
}

TEST_F(LayerExchangesTest, ForwardsOfOneBackwardCountTogether) {
  forward({kSum});
  forward({kGather});
  backward({kGather, kSum});
  exchanges_.agree(only_mine);
  EXPECT_EQ(planned().units[2].in_forward, (List{kSum, kGather}));
  forward({kSum});
  forward({kGather});
  backward({kGather, kSum});
  EXPECT_TRUE(says("off plan so far: 0"));
}

TEST_F(LayerExchangesTest, ForwardsInPipelinesCountAlone) {
  exchanges_ = {3, {{module_.text.get(), 2}}, true};
  forward({kSum});
  forward({kSum});
  exchanges_.begin_backward();  // of a stage without the module
  exchanges_.agree(only_mine);
  EXPECT_EQ(planned().units[2].in_forward, List{kSum});
}

TEST_F(LayerExchangesTest, OthersThanPlannedAreCounted) {
  forward({kSum, kGather});
  exchanges_.agree(only_mine);
  backward({});
  forward({kSum, kGather});
  EXPECT_TRUE(says("off plan so far: 0"));
  backward({kSum});                      // one more in backward
  forward({kGather, kGather, kGather});  // one of another kind, one more
  EXPECT_TRUE(says("off plan so far: 3"));
  backward({});
  exchanges_.ignore(true);
  forward({kTokens, kTokens});
  EXPECT_TRUE(says("off plan so far: 3"));
}

TEST_F(LayerExchangesTest, RanksThatDifferPlanNothing) {
  forward({kSum});
  exchanges_.agree([](const std::string&, const std::string& text) {
    return std::vector<std::string>{text, "forward u2 all_gather(tensor)\n"};
  });
  EXPECT_TRUE(planned().units[2].in_forward.empty());
  EXPECT_TRUE(says("forward u2 all_reduce(tensor)")) << exchanges_.text();
}

TEST_F(LayerExchangesTest, BytesMayDifferBetweenRanks) {
  LayerExchange more = kSum;
  more.sent = 200;
  forward({more});
  exchanges_.agree([](const std::string&, const std::string& text) {
    return std::vector<std::string>{text, "forward u2 all_reduce(tensor)\n"};
  });
  EXPECT_EQ(planned().units[2].in_forward, List{more});
}

TEST_F(LayerExchangesTest, ARestartForgetsAll) {
  forward({kSum});
  exchanges_.agree(only_mine);
  exchanges_.restart();
  exchanges_.begin_backward();
  forward({}, {kTokens});
  exchanges_.agree(only_mine);
  EXPECT_TRUE(planned().units[2].in_forward.empty());
  EXPECT_EQ(planned().units[1].in_forward, List{kTokens});
}

}  // namespace
}  // namespace penstock::engine
