#include "src/base/text.h"

#include <gtest/gtest.h>

#include <optional>
#include <utility>
#include <vector>

#include "penstock/error.h"

namespace penstock {
namespace {

TEST(TextTest, SplitKeepsEmptyPartsAndJoinUndoesIt) {
  for (const char* text : {"", "a", "a,b", ",a,,b,"}) {
    const auto parts = split(text, ',');
    EXPECT_EQ(join(parts, ","), text);
  }
  EXPECT_EQ(split(",a,", ',').size(), 3U);
  EXPECT_EQ(split("", ',').size(), 1U);
}

TEST(TextTest, TrimTakesBlanksOffBothEnds) {
  EXPECT_EQ(trim(" \ta b\n"), "a b");
  EXPECT_EQ(trim("  "), "");
}

TEST(TextTest, NearestFindsMisspellingsOnly) {
  const std::vector<std::string> names = {"zero1", "zero3", "hpz"};
  EXPECT_EQ(nearest("zer3", names), "zero3");
  EXPECT_EQ(nearest("hzp", names), "hpz");
  EXPECT_EQ(nearest("optimizer", names), "");
  EXPECT_EQ(nearest("zero", {}), "");
}

TEST(TextTest, HashIsFnv1a) {
  EXPECT_EQ(hash_text(""), 0xcbf29ce484222325ULL);
  EXPECT_EQ(hash_text("a"), 0xaf63dc4c8601ec8cULL);
  EXPECT_EQ(hash_text("b", hash_text("a")), hash_text("ab"));
}

TEST(TextTest, BytesReadWell) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(1023), "1023 B");
  EXPECT_EQ(format_bytes(1536.0 * 1024 * 1024), "1.50 GiB");
  EXPECT_EQ(format_bytes(5.0 * 1024 * 1024 * 1024 * 1024 * 1024), "5120.00 TiB");
}

TEST(TextTest, BytesAreReadWithTheirUnits) {
  const std::vector<std::pair<const char*, std::optional<int64_t>>> kCases = {
      {"0", 0},
      {"512", 512},
      {"4GiB", 4LL << 30},
      {" 1.5 TiB ", 3LL << 39},
      {"80GB", 80'000'000'000},
      {"1e3 KiB", 1000 << 10},
      {"64 b", std::nullopt},
      {"", std::nullopt},
      {"GiB", std::nullopt},
      {"-1", std::nullopt},
      {"0.3B", std::nullopt},
      {"1e30", std::nullopt},
      {"nan", std::nullopt},
  };
  for (const auto& [text, bytes] : kCases) EXPECT_EQ(parse_bytes(text), bytes) << text;
}

TEST(ErrorTest, AnAssertionNamesItsConditionAndMessage) {
  try {
    PENSTOCK_ASSERT(1 + 1 == 3, "arithmetic");
    FAIL() << "no Bug was thrown";
  } catch (const Bug& bug) {
    EXPECT_NE(std::string(bug.what()).find("text_test.cpp"), std::string::npos);
    EXPECT_NE(std::string(bug.what()).find("arithmetic (broken: 1 + 1 == 3)"), std::string::npos);
  }
}

}  // namespace
}  // namespace penstock
