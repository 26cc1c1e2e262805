#include "src/engine/step/accumulation_window.h"

#include <gtest/gtest.h>

#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "penstock/error.h"

namespace penstock::engine {
namespace {

AccumulationWindow after(AccumulationWindow window, const std::initializer_list<Call>& calls) {
  for (const Call call : calls) window.on(call);
  return window;
}

// Returns one letter per call that is refused.
std::string refused(const AccumulationWindow& window) {
  const std::vector<std::pair<Call, char>> letters = {
      {Call::kForward, 'f'},     {Call::kBackward, 'b'},  {Call::kBackwardBegin, 'a'},
      {Call::kBackwardEnd, 'e'}, {Call::kFullGrads, 'g'}, {Call::kSetGrads, 's'},
      {Call::kStep, 'w'},        {Call::kUpdate, 'u'},    {Call::kDrop, 'd'}};
  std::string text;
  for (const auto& [call, letter] : letters) {
    if (window.refusal(call) != nullptr) text += letter;
  }
  return text;
}

TEST(AccumulationWindow, EachStateRefusesWhatItCannotServe) {
  const Call f = Call::kForward, b = Call::kBackward, a = Call::kBackwardBegin,
             e = Call::kBackwardEnd, u = Call::kUpdate, d = Call::kDrop;
  const struct {
    const char* state;
    std::initializer_list<Call> calls;
    const char* refused;         // if the loss is not scaled
    const char* refused_scaled;  // if the loss is scaled
  } cases[] = {
      {"idle", {}, "bgsw", "bagsw"},
      {"forward seen", {f}, "gsw", "agsw"},
      {"announced", {f, b}, "gsw", "gsw"},
      {"armed", {f, b, a}, "gsu", "gsu"},
      {"1 of 2", {f, b, a, e}, "s", "as"},
      {"armed again", {f, b, a, e, f, b, a}, "su", "su"},
      {"complete", {f, b, a, e, f, b, a, e}, "", "a"},
      {"3 of 2", {f, b, a, e, f, b, a, e, b, a, e}, "", "a"},
      {"next", {f, b, a, e, f, b, a, e, u}, "bgsw", "bagsw"},
      {"dropped", {f, b, a, e, f, b, a, d}, "gsw", "agsw"},
  };
  for (const auto& one : cases) {
    EXPECT_EQ(refused(after({2, false, true}, one.calls)), one.refused) << one.state;
    EXPECT_EQ(refused(after({2, true, true}, one.calls)), one.refused_scaled) << one.state;
  }
}

TEST(AccumulationWindow, ARefusedCallThrowsWhatTheUserReadsAndChangesNothing) {
  AccumulationWindow window(1, true, true);
  try {
    window.on(Call::kBackward);
    FAIL();
  } catch (const RuntimeFault& error) {
    EXPECT_NE(std::string(error.what()).find("without a forward since the last step"),
              std::string::npos);
  }
  window.on(Call::kForward);
  EXPECT_THROW(window.on(Call::kBackwardBegin), RuntimeFault);
  EXPECT_FALSE(window.armed());
}

TEST(AccumulationWindow, TheLastBackwardReducesAndTheAverageIsOverWhatWasSeen) {
  AccumulationWindow window(2, false, true);
  const std::vector<std::pair<bool, int64_t>> expected = {{false, 1}, {true, 2}, {true, 2}};
  for (const auto& [reduces, num_averaged] : expected) {
    window.on(Call::kBackwardBegin);
    EXPECT_EQ(window.reduces(), reduces);
    window.on(Call::kBackwardEnd);
    EXPECT_EQ(window.num_averaged(), num_averaged);
  }
  EXPECT_EQ(window.seen(), 3);
}

TEST(AccumulationWindow, BackwardsThatGaveNothingAnywhereAreNoneOfIt) {
  AccumulationWindow window(2, false, true);
  for (const bool gives : {false, true, false, true}) {
    window.on(Call::kBackwardBegin);
    if (gives) window.contribute();
    window.on(Call::kBackwardEnd);
  }
  EXPECT_EQ(window.said(), "01");
  EXPECT_TRUE(window.keep("01"));
  EXPECT_EQ(window.said(), "10");
  EXPECT_FALSE(window.keep("11"));  // another rank had gradients
  EXPECT_TRUE(window.keep("10"));
  EXPECT_EQ(window.said(), "11");
  EXPECT_TRUE(window.gave());
  EXPECT_TRUE(window.complete());
  EXPECT_EQ(window.num_averaged(), 2);
  window.on(Call::kUpdate);
  EXPECT_FALSE(window.keep("01"));
  EXPECT_EQ(window.said(), "..");
}

TEST(AccumulationWindow, StagesRunTheMicroBatchesInOrdersOfTheirOwn) {
  // Two stages on each rank; micro-batch 1 reaches nothing that trains on any stage.
  const std::vector<std::vector<std::pair<int, bool>>> ranks = {
      {{0, true}, {1, false}, {0, false}, {1, false}, {2, true}, {2, true}},
      {{0, false}, {0, true}, {1, false}, {1, false}, {2, false}, {2, false}}};
  std::vector<AccumulationWindow> windows(2, AccumulationWindow(6, false, true, 2));
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    for (const auto& [micro, gives] : ranks[rank]) {
      windows[rank].on(Call::kBackwardBegin);
      if (gives) windows[rank].contribute();
      windows[rank].on(Call::kBackwardEnd);
      windows[rank].set_micro(micro);
    }
  }
  EXPECT_EQ(windows[0].said(), "110011");
  EXPECT_EQ(windows[1].said(), "110000");
  for (AccumulationWindow& window : windows) {
    EXPECT_TRUE(window.keep("110011"));
    EXPECT_FALSE(window.complete());
    EXPECT_EQ(window.num_averaged(), 4);
  }
  EXPECT_EQ(windows[0].said(), "1111..");
  EXPECT_EQ(windows[1].said(), "1100..");
}

TEST(AccumulationWindow, TheFirstBadContributionIsKeptUntilItIsTakenOrDropped) {
  AccumulationWindow window(1, false, true);
  window.blame("a");
  window.blame("b");
  EXPECT_EQ(window.take_blamed(), "a");
  EXPECT_FALSE(window.blamed());
  window.blame("c");
  window.on(Call::kDrop);
  EXPECT_EQ(window.take_blamed(), "");
}

}  // namespace
}  // namespace penstock::engine
