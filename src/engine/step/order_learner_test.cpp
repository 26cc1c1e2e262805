#include "src/engine/step/order_learner.h"

#include <gtest/gtest.h>

#include <map>

#include "penstock/error.h"

namespace penstock::engine {
namespace {

constexpr Op kForward = Op::kForward, kBackward = Op::kBackward;

ModelDesc chain(int num_units) {
  ModelDesc model;
  for (int unit = 0; unit < num_units; ++unit) model.units.push_back({"u", {{512}}});
  assume_order(model, true);
  return model;
}

OrderLearner::Scope moving(int tile = -1) {
  return {true, true, false, [tile](int unit) { return unit == tile; }};
}

// One pass in which the root encloses `units`.
void run(OrderLearner& learner, Op pass, const std::vector<int>& units) {
  if (pass == kForward) learner.begin_forward(true);
  if (pass == kBackward) learner.begin_backward();
  learner.begin(pass, 0);
  for (const int unit : units) {
    learner.begin(pass, unit);
    learner.end(pass, unit);
  }
  learner.end(pass, 0);
  if (pass == kForward) learner.end_forward();
}

std::vector<std::string> alone(const std::string&, const std::string& text) { return {text}; }

// A second rank that shares other texts.
OrderLearner::ShareText beside(const std::string& order, const std::string& off_plan) {
  const std::map<std::string, std::string> theirs = {{"order of step one", order},
                                                     {"off plan in step one", off_plan}};
  return [theirs](const std::string& label, const std::string& text) {
    return std::vector<std::string>{text, theirs.at(label)};
  };
}

TEST(OrderLearner, UnitsStayWholeInABackwardThatReturnsToUnits) {
  const std::string whole = "u0 begin\nu2 begin\nu1 begin\nu2 end\nu1 end\nu0 end";
  OrderLearner learner(chain(3), moving());
  run(learner, kForward, {1, 2});
  run(learner, kForward, {2});
  ASSERT_TRUE(learner.may_return());
  learner.keep_whole();
  EXPECT_FALSE(learner.may_return());
  EXPECT_EQ(visits_text(learner.assumed().backward), whole);
  // The other rank skips another unit, so the assumed order stays.
  EXPECT_EQ(visits_text(learner.agree(0, beside("other", "0")).backward), whole);
  learner.restart(learner.assumed());
  EXPECT_FALSE(learner.may_return());
}

TEST(OrderLearner, ABackwardMayReturnUnlessTheRanksSawOneOrder) {
  for (const bool differ : {false, true}) {
    OrderLearner learner(chain(3), moving());
    run(learner, kForward, {1, 2});
    run(learner, kBackward, {2, 1});
    if (differ) {
      learner.agree(0, beside("other", "0"));
    } else {
      learner.agree(0, alone);
    }
    EXPECT_EQ(learner.may_return(), differ);
  }
  OrderLearner::Scope stage = moving(), still = moving();
  stage.interleaves = true;
  still.moves_params = false;
  EXPECT_FALSE(OrderLearner(chain(3), stage).may_return());
  EXPECT_FALSE(OrderLearner(chain(3), still).may_return());
}

struct Missing {
  std::vector<int> ran;  // in forward, and in reverse order in backward
  const char *forward, *backward;
  bool whole = false;
};

TEST(OrderLearner, UnitsThatDidNotRunComeWhereTheAssumedOrderHasThem) {
  const Missing table[] = {
      {{2, 3}, "u0 begin\nu1\nu2\nu3\nu0 end", "u0 begin\nu3\nu2\nu1\nu0 end"},
      {{1, 3}, "u0 begin\nu1\nu2\nu3\nu0 end", "u0 begin\nu3\nu2\nu1\nu0 end"},
      {{1, 2}, "u0 begin\nu1\nu2\nu3\nu0 end", "u0 begin\nu3\nu2\nu1\nu0 end"},
      {{3, 1}, "u0 begin\nu3\nu1\nu2\nu0 end", "u0 begin\nu1\nu3\nu2\nu0 end"},
      {{2}, "u0 begin\nu1\nu2\nu3\nu0 end", "u0 begin\nu3\nu2\nu1\nu0 end"},
      {{1, 3}, "u0 begin\nu1\nu2\nu3\nu0 end", "u0 begin\nu3\nu2 begin\nu1\nu2 end\nu0 end", true},
  };
  for (const Missing& one : table) {
    OrderLearner learner(chain(4), moving());
    run(learner, kForward, one.ran);
    if (one.whole) learner.keep_whole();
    run(learner, kBackward, {one.ran.rbegin(), one.ran.rend()});
    const ModelDesc model = learner.agree(0, alone);
    EXPECT_EQ(visits_text(model.forward), one.forward);
    EXPECT_EQ(visits_text(model.backward), one.backward);
  }
}

TEST(OrderLearner, TheLastTrainingForwardBeforeTheBackwardCounts) {
  OrderLearner learner(chain(4), moving());
  run(learner, kForward, {1, 2, 3});
  run(learner, kForward, {3, 1, 2});
  learner.begin_forward(false);  // an evaluation
  learner.begin(kForward, 2);
  learner.end(kForward, 2);
  learner.end_forward();
  run(learner, kBackward, {2, 1, 3});
  const ModelDesc model = learner.agree(0, alone);
  EXPECT_EQ(visits_text(model.forward), "u0 begin\nu3\nu1\nu2\nu0 end");
  EXPECT_EQ(visits_text(model.backward), "u0 begin\nu2\nu1\nu3\nu0 end");
}

TEST(OrderLearner, WithoutEventsInForwardItsOrderStaysAssumed) {
  OrderLearner learner(chain(3), {false, false, false, [](int) { return false; }});
  run(learner, kForward, {2, 1});
  learner.begin_backward();
  for (const int unit : {1, 2, 0}) learner.end(kBackward, unit);
  const ModelDesc model = learner.agree(0, alone);
  EXPECT_EQ(model.forward, chain(3).forward);
  EXPECT_EQ(visits_text(model.backward), "u1\nu2\nu0");
}

TEST(OrderLearner, UnitsReadOutsideTheirModuleAreWholeForEntirePasses) {
  OrderLearner learner(chain(4), moving());
  learner.span(3);
  learner.span(1);
  EXPECT_TRUE(learner.spans(1));
  EXPECT_FALSE(learner.spans(2));
  run(learner, kForward, {1, 2, 3});
  run(learner, kBackward, {3, 2, 1});
  const ModelDesc model = learner.agree(0, alone);
  const std::string expected = "u0 begin\nu3 begin\nu1 begin\nu2\nu3 end\nu1 end\nu0 end";
  EXPECT_EQ(visits_text(model.forward), expected);
  EXPECT_EQ(visits_text(model.backward), expected);
}

TEST(OrderLearner, ATableThatNoGradientReachedStillNeedsNoParameters) {
  ModelDesc model = chain(3);
  for (Visit& visit : model.backward) {
    if (visit.unit == 1) visit.mark = Mark::kGradient;
  }
  OrderLearner learner(model, moving());
  run(learner, kForward, {1, 2});
  run(learner, kBackward, {2});
  EXPECT_EQ(visits_text(learner.agree(0, alone).backward), "u0 begin\nu2\nu1 gradient\nu0 end");
}

TEST(OrderLearner, TellsWhatAForwardEntersAgain) {
  OrderLearner learner(chain(3), moving()), still(chain(3), {true, false, false, {}});
  for (OrderLearner* one : {&learner, &still}) {
    one->begin_forward(true);
    EXPECT_FALSE(one->enters_again(1));
    one->begin(kForward, 1);
    one->end(kForward, 1);
    EXPECT_EQ(one->enters_again(1), one == &learner);
    EXPECT_FALSE(one->enters_again(2));
  }
  learner.begin_forward(true);
  EXPECT_FALSE(learner.enters_again(1));
  learner.begin(kForward, 1);
  learner.end_forward();
  EXPECT_FALSE(learner.enters_again(1));
}

TEST(OrderLearner, ATileThatIsNotUsedInForwardIsNotBroughtThere) {
  OrderLearner learner(chain(3), moving(/*tile=*/2));
  run(learner, kForward, {1});
  learner.begin_backward();
  learner.begin(kBackward, 0);
  learner.add(kBackward, {2, Mark::kUse});
  learner.add(kBackward, {2, Mark::kGradient});
  learner.end(kBackward, 1);  // it was not entered
  learner.end(kBackward, 0);
  const ModelDesc model = learner.agree(0, alone);
  EXPECT_EQ(visits_text(model.forward), "u0 begin\nu1\nu0 end");
  EXPECT_EQ(visits_text(model.backward), "u0 begin\nu2 use\nu2 gradient\nu1 gradient\nu0 end");
}

TEST(OrderLearner, WhereRanksDifferTheAssumedOrderStaysIfItServedThemAll) {
  const OrderLearner::Scope still = {true, false, false, [](int) { return false; }};
  const struct {
    OrderLearner::Scope scope;
    const char* off_plan;  // on the other rank
    bool refused;
  } cases[] = {{moving(), "0", false}, {moving(), "1", true}, {still, "1", false}};
  for (const auto& one : cases) {
    OrderLearner learner(chain(3), one.scope);
    run(learner, kForward, {2, 1});
    run(learner, kBackward, {1, 2});
    const auto share = beside("u0 begin\nu1", one.off_plan);
    if (one.refused) {
      EXPECT_THROW(learner.agree(0, share), RuntimeFault);
    } else {
      EXPECT_EQ(learner.agree(0, share), chain(3));
    }
    EXPECT_TRUE(learner.done());
  }
}

}  // namespace
}  // namespace penstock::engine
