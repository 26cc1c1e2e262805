#include "src/trace/chrome.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

namespace penstock::trace::chrome_test {
namespace {

Text text(const std::string& words) { return std::make_shared<const std::string>(words); }

struct Rank2 : Recorder {
  Rank2() : Recorder(4) {
    about.rank = 2;
    about.host = "host";
    about.offset_ns = 1000;
    row("gather");
  }
};
const Rank2 kOf;

TEST(Chrome, ASliceAnEvent) {
  const Event line{5000, 9000, 3, 8000, 0, text("move \"u1\""), 2, Kind::kLine};
  const std::string made = chrome_events(kOf, {line});
  EXPECT_NE(made.find(R"({"ph":"X","name":"move \"u1\"","pid":2,"tid":2,"ts":6.000,"dur":4.000,)"
                      R"("cat":"line","args":{"step":3,"bytes":8000,"GB/s":2}})"),
            std::string::npos)
      << made;
  EXPECT_NE(made.find(R"("args":{"name":"rank 2 on host"})"), std::string::npos);
  EXPECT_NE(made.find(R"("tid":2,"args":{"name":"gather"})"), std::string::npos);
  EXPECT_EQ(made.find(R"("ph":"s")"), std::string::npos);  // no row waited
}

TEST(Chrome, ArrowsLeadToWhoWaited) {
  const Event line{5000, 9000, 1, 0, 4, text("a"), 2, Kind::kLine};
  const Event wait{6000, 9500, 1, 0, 4, text("a"), 0, Kind::kWait};
  const Event other{6000, 9500, 1, 0, 5, text("b"), 2, Kind::kLine};
  const std::string made = chrome_events(kOf, {line, wait, other});
  EXPECT_NE(made.find(R"({"ph":"s","name":"done","pid":2,"tid":2,"ts":9.999,)"), std::string::npos)
      << made;
  EXPECT_NE(made.find(R"({"ph":"f","name":"done","pid":2,"tid":0,"ts":10.499,)"),
            std::string::npos);
  EXPECT_EQ(made.find(R"("id":"2.5")"), std::string::npos);
}

TEST(Chrome, TheDiskDoesSeveralAtOnce) {
  const Event read{0, 9000, 1, 4096, 0, text("read"), 1, Kind::kRead};
  const std::string made = chrome_events(kOf, {read, read});
  EXPECT_NE(made.find(R"("ph":"b")"), std::string::npos);
  EXPECT_NE(made.find(R"("id":"2.1")"), std::string::npos);
}

TEST(Chrome, WhatIsPredictedIsBeside) {
  const Event line{5000, 9000, 3, 0, 0, text("move u1"), 2, Kind::kLine};
  const Event inside{5000, 9000, 3, 0, 0, text("move u1"), 2, Kind::kExchange};
  const std::string made = chrome_events(kOf, {line, inside}, {{"move u1", 0.25}});
  EXPECT_NE(made.find(R"("args":{"step":3,"predicted_ms":250}})"), std::string::npos) << made;
  EXPECT_NE(made.find(R"("args":{"step":3}})"), std::string::npos);
}

TEST(Chrome, WhatAnErrorLeaves) {
  Rank2 recorder;
  EXPECT_EQ(dump(recorder), "");  // no folder is set
  recorder.about.folder = testing::TempDir();
  recorder.add({5000, 9000, 0, 0, 0, text("move u1"), 2, Kind::kLine});
  const std::string said = dump(recorder);
  const std::string path = said.substr(said.find('/'));
  EXPECT_EQ(said, "; the last steps are in " + path);
  std::ifstream file(path);
  const std::string made{std::istreambuf_iterator<char>(file), {}};
  EXPECT_NE(made.find(R"("name":"move u1")"), std::string::npos) << made;
  std::filesystem::remove(path);
  recorder.about.folder = "/nowhere";
  EXPECT_NE(dump(recorder).find("; no timeline could be written to /nowhere/"), std::string::npos);
}

TEST(Chrome, TheWholeFile) {
  EXPECT_EQ(chrome_trace({"{1}", "", "{2}"}, "{}"),
            "{\"traceEvents\":[\n{1},\n{2}\n],\"displayTimeUnit\":\"ms\",\"otherData\":{}}\n");
}

}  // namespace
}  // namespace penstock::trace::chrome_test
