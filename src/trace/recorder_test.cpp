#include "src/trace/recorder.h"

#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

namespace penstock::trace::recorder_test {
namespace {

Text text(const std::string& words) { return std::make_shared<const std::string>(words); }

Event event(int64_t begin, int64_t end, const std::string& words, Kind kind = Kind::kLine) {
  return {begin, end, 0, 0, 0, text(words), Recorder::kModel, kind};
}

std::vector<std::string> texts(const std::vector<Event>& events) {
  std::vector<std::string> words;
  for (const Event& one : events) words.push_back(*one.text);
  return words;
}

TEST(Recorder, KeepsTheLast) {
  Recorder recorder(3);
  for (int i = 0; i < 2; ++i) recorder.add(event(i, i + 1, std::to_string(i)));
  EXPECT_EQ(texts(recorder.last()), (std::vector<std::string>{"0", "1"}));
  for (int i = 2; i < 8; ++i) recorder.add(event(i, i + 1, std::to_string(i)));
  EXPECT_EQ(texts(recorder.last()), (std::vector<std::string>{"5", "6", "7"}));
  EXPECT_EQ(recorder.sum(Recorder::kModel, Kind::kLine).count, 8);
  EXPECT_EQ(recorder.sum(Recorder::kModel, Kind::kLine).ns, 8);
}

TEST(Recorder, RecordsWhatWasAskedFor) {
  Recorder recorder(1);
  recorder.add(event(0, 1, "before"));
  recorder.record();
  recorder.set_step(7);
  for (const char* words : {"a", "b", "c"}) recorder.add(event(0, 1, words));
  const std::vector<Event> events = recorder.end_record();
  EXPECT_EQ(texts(events), (std::vector<std::string>{"a", "b", "c"}));
  EXPECT_EQ(events.front().step, 7);
  recorder.add(event(0, 1, "after"));
  EXPECT_TRUE(recorder.end_record().empty());
}

TEST(Recorder, OffItSumsNothing) {
  Recorder recorder(0);
  recorder.add(event(0, 1, "x"));
  {
    const Span span(&recorder, Kind::kLine, text("y"));
  }
  EXPECT_TRUE(recorder.last().empty());
  EXPECT_EQ(recorder.sum(Kind::kLine).count, 0);
}

TEST(Recorder, SpansAreOfTheThreadsRow) {
  Recorder recorder(8);
  const int16_t lane = recorder.row("lane");
  EXPECT_EQ(recorder.row("lane"), lane);
  std::thread([&] {
    Recorder::set_row_here(lane);
    Span span(&recorder, Kind::kExchange, text("x"));
    span.add_bytes(5);
  }).join();
  {
    const Span nothing(&recorder, Kind::kLine, nullptr);
  }
  {
    const Span nowhere(nullptr, Kind::kLine, text("z"));
  }
  {
    Span brief(&recorder, Kind::kLine, text("brief"));
    brief.at_least(int64_t{1} << 40);
  }
  ASSERT_EQ(recorder.last().size(), 1U);
  EXPECT_EQ(recorder.last().front().row, lane);
  EXPECT_EQ(recorder.sum(lane, Kind::kExchange).bytes, 5);
}

TEST(Recorder, TheModelsWaitsByWhatTheyAreFor) {
  Recorder recorder(8);
  const int16_t lane = recorder.row("lane");
  Event wait = event(10, 25, "w", Kind::kWait);
  wait.of = lane;
  recorder.add(wait);
  wait.row = lane;  // the wait of another thread
  recorder.add(wait);
  EXPECT_EQ(recorder.waited_for(lane).ns, 15);
  EXPECT_EQ(recorder.sum(Kind::kWait).ns, 30);
}

TEST(Recorder, FromManyThreads) {
  Recorder recorder(16);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      const AtLine at(text("line"));
      for (int j = 0; j < 500; ++j) {
        const Span span(&recorder, Kind::kLine, Recorder::line_here());
        if (j % 50 == 0) recorder.last();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(recorder.sum(Kind::kLine).count, 2000);
  EXPECT_EQ(recorder.last().size(), 16U);
  EXPECT_EQ(Recorder::line_here(), nullptr);
}

}  // namespace
}  // namespace penstock::trace::recorder_test
