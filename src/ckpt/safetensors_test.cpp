#include "src/ckpt/safetensors.h"

#include <gtest/gtest.h>

#include <random>
#include <string>

#include "src/ckpt/damaged.h"

namespace penstock::ckpt {
namespace {

const std::vector<TensorHead> kTwo = {{"a \"quoted\" näme", "F32", {2, 3}, 0, 24},
                                      {"b", "BF16", {}, 24, 26}};

int64_t whole_file(const std::string& head) { return static_cast<int64_t>(head.size()) + 26; }

TEST(Safetensors, AHeadIsReadAsItWasWritten) {
  const std::string head = write_head(kTwo, 4096);
  EXPECT_EQ(head.size(), 4096U);
  EXPECT_EQ(head_bytes(head.substr(0, 8), whole_file(head)), 4096);
  const std::vector<TensorHead> read = parse_head(head, whole_file(head));
  ASSERT_EQ(read.size(), 2U);
  EXPECT_EQ(read[0].name, kTwo[0].name);
  EXPECT_EQ(read[0].shape, kTwo[0].shape);
  EXPECT_EQ(read[1].dtype, "BF16");
  EXPECT_EQ(read[1].end, 26);
}

std::string with_json(const std::string& json) {
  std::string head(8, '\0');
  for (size_t i = 0; i < 8; ++i) head[i] = static_cast<char>(json.size() >> (8 * i));
  return head + json;
}

struct Bad {
  const char* json;
  const char* says;
};

TEST(Safetensors, WhatCannotBeIsRefused) {
  const Bad cases[] = {
      {"", "not valid JSON"},
      {"[]", "not a JSON object"},
      {R"({"a": 1})", "not a JSON object"},
      {R"({"a": {"dtype": "F32", "shape": [1]}})", "data_offsets"},
      {R"({"a": {"dtype": "F31", "shape": [1], "data_offsets": [0, 4]}})", "unknown dtype"},
      {R"({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}})", "shape and dtype"},
      {R"({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}})", "not in the range 0"},
      {R"({"a": {"dtype": "F32", "shape": [4611686018427387904, 4], "data_offsets": [0, 4]}})",
       "shape and dtype"},
      {R"({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}})", "not in the range"},
      {R"({"a": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}})", "does not begin where"},
      {R"({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}})", "do not end"},
      {R"({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}, "a": {}})", "twice"},
      {R"({"a": {"dtype": "U8", "shape": [18446744073709551615], "data_offsets": [0, 4]}})",
       "not a whole number"},
      {R"({"a": {"dtype": "U8", "shape": [4.0], "data_offsets": [0, 4]}})", "not a whole number"},
  };
  for (const Bad& bad : cases) {
    const std::string head = with_json(bad.json);
    try {
      parse_head(head, static_cast<int64_t>(head.size()) + 4);
      ADD_FAILURE() << bad.json;
    } catch (const Damaged& error) {
      EXPECT_NE(std::string(error.what()).find(bad.says), std::string::npos)
          << bad.json << ": " << error.what();
    }
  }
}

TEST(Safetensors, ALengthBeyondTheFileIsRefused) {
  EXPECT_THROW(head_bytes("\xff\xff\xff\xff\xff\xff\xff\xff", 1 << 20), Damaged);
  EXPECT_THROW(head_bytes(std::string("\x10\0\0\0\0\0\0\0", 8), 16), Damaged);
  EXPECT_THROW(head_bytes("abc", 3), Damaged);
}

TEST(Safetensors, DeepNestingIsRefusedAndNotFollowed) {
  const std::string head = with_json(std::string(1 << 20, '['));
  EXPECT_THROW(parse_head(head, static_cast<int64_t>(head.size())), Damaged);
}

// A mutated header is either parsed or refused; nothing else may happen.
TEST(Safetensors, TenThousandMutations) {
  const std::string good = write_head(kTwo, 64);
  std::mt19937 random(7);
  int refused = 0;
  for (int i = 0; i < 10'000; ++i) {
    std::string head = good;
    for (int edits = 1 + static_cast<int>(random() % 4); edits > 0; --edits) {
      const size_t at = random() % head.size();
      switch (random() % 3) {
        case 0:
          head[at] = static_cast<char>(head[at] ^ (1 << (random() % 8)));
          break;
        case 1:
          head.erase(at, 1 + random() % 5);
          break;
        default:
          head.insert(at, 1, "{}[]\",:019-eE"[random() % 13]);
      }
      if (head.empty()) head = "x";
    }
    try {
      for (const TensorHead& tensor : parse_head(head, static_cast<int64_t>(head.size()) + 26)) {
        ASSERT_LE(tensor.end, 26);
      }
    } catch (const Damaged&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 5'000);
}

}  // namespace
}  // namespace penstock::ckpt
