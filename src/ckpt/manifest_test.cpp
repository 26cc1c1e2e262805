#include "src/ckpt/manifest.h"

#include <gtest/gtest.h>

#include <functional>
#include <random>
#include <string>

#include "src/ckpt/checksum.h"
#include "src/ckpt/damaged.h"

namespace penstock::ckpt {
namespace {

File file_named(const std::string& name) {
  return {name, 4096 + 4096 + 64, 4096, 8192, 512, std::string(16, '0')};
}

Manifest good() {
  Manifest manifest;
  manifest.world = 2;
  manifest.state = {{"steps", 3}};
  manifest.ranks = {Json::object(), Json::object()};
  manifest.files = {file_named("rank-0.safetensors"), file_named("rank-1.safetensors")};
  manifest.tensors = {{"param", "w", -1, {4, 8}, "F32", {{0, 20, 0, 4096}, {20, 32, 1, 4096}}},
                      {"rng", "torch", 1, {16}, "U8", {{0, 16, 1, 5000}}},
                      {"param", "empty", -1, {0, 8}, "F32", {}}};
  return manifest;
}

std::string error_of(const std::string& text) {
  try {
    Manifest::parse(text);
    return "";
  } catch (const Damaged& error) {
    return error.what();
  }
}

TEST(Manifest, IsReadAsItWasWritten) {
  const Manifest read = Manifest::parse(good().text());
  EXPECT_EQ(read.text(), good().text());
  ASSERT_NE(read.find("rng/torch@rank1"), nullptr);
  EXPECT_EQ(read.find("rng/torch"), nullptr);
  EXPECT_EQ(read.find("param/w")->slices[1].file, 1);
}

TEST(Manifest, AnotherVersionIsNamed) {
  std::string text = good().text();
  text.replace(text.find(":1"), 2, ":2");
  EXPECT_NE(error_of(text).find("format version 2 is not supported; this Penstock reads version 1"),
            std::string::npos);
}

TEST(Manifest, WhatCannotBeIsRefused) {
  struct Case {
    const char* says;
    std::function<void(Manifest&)> change;
  };
  const Case cases[] = {
      {"not a plain file name", [](Manifest& m) { m.files[0].name = "../../etc/passwd"; }},
      {"not a plain file name", [](Manifest& m) { m.files[0].name = "/etc/passwd"; }},
      {"not a plain file name", [](Manifest& m) { m.files[0].name = ".."; }},
      {"not a plain file name", [](Manifest& m) { m.files[0].name = ""; }},
      {"listed twice", [](Manifest& m) { m.files[1].name = m.files[0].name; }},
      {"one checksum per granule", [](Manifest& m) { m.files[0].granule = 1; }},
      {"not in the range", [](Manifest& m) { m.files[0].table = m.files[0].bytes + 1; }},
      {"not in the range", [](Manifest& m) { m.tensors[0].slices[0].file = 2; }},
      {"not in the range", [](Manifest& m) { m.tensors[0].slices[0].offset = 100; }},
      {"ends outside", [](Manifest& m) { m.tensors[0].slices[1].offset = 8190; }},
      {"gap or an overlap", [](Manifest& m) { m.tensors[0].slices[1].begin = 21; }},
      {"gap or an overlap", [](Manifest& m) { m.tensors[0].slices[1].begin = 19; }},
      {"end at element", [](Manifest& m) { m.tensors[0].slices[1].end = 31; }},
      {"invalid shape or dtype", [](Manifest& m) { m.tensors[0].dtype = "F31"; }},
      {"invalid shape or dtype", [](Manifest& m) { m.tensors[0].shape = {1LL << 40, 1LL << 40}; }},
      {"occurs twice", [](Manifest& m) { m.tensors.push_back(m.tensors[0]); }},
      {"for each rank", [](Manifest& m) { m.ranks.pop_back(); }},
  };
  for (const Case& one : cases) {
    Manifest manifest = good();
    one.change(manifest);
    EXPECT_NE(error_of(manifest.text()).find(one.says), std::string::npos)
        << one.says << " | " << error_of(manifest.text());
  }
}

TEST(Manifest, AnyChangedByteIsSeen) {
  const std::string text = good().text();
  for (size_t at = 0; at < text.size(); ++at) {
    std::string other = text;
    other[at] = static_cast<char>(other[at] ^ 1);
    EXPECT_NE(error_of(other), "") << at;
  }
  EXPECT_NE(error_of(text.substr(0, text.size() / 2)), "");
  EXPECT_NE(error_of(""), "");
}

// The checksum matches, so the parser itself must refuse the text.
TEST(Manifest, TenThousandMutations) {
  const std::string text = good().text();
  const size_t body = text.find('\n') + 1;
  std::mt19937 random(11);
  int refused = 0;
  for (int i = 0; i < 10'000; ++i) {
    std::string rest = text.substr(body);
    for (int edits = 1 + static_cast<int>(random() % 3); edits > 0; --edits) {
      const size_t at = random() % rest.size();
      switch (random() % 3) {
        case 0:
          rest[at] = static_cast<char>(rest[at] ^ (1 << (random() % 8)));
          break;
        case 1:
          rest.erase(at, 1 + random() % 6);
          break;
        default:
          rest.insert(at, 1, "{}[]\",:019-e"[random() % 12]);
      }
      if (rest.empty()) rest = "x";
    }
    const std::string sum = hex(checksum(rest.data(), static_cast<int64_t>(rest.size())));
    const std::string whole = "{\"penstock_checkpoint\":1,\"checksum\":\"" + sum + "\",\n" + rest;
    refused += error_of(whole).empty() ? 0 : 1;
  }
  EXPECT_GT(refused, 5'000);
}

TEST(Manifest, PartsBecomeAWhole) {
  const Manifest whole = good();
  std::vector<Manifest> parts(2);
  for (int rank = 0; rank < 2; ++rank) {
    parts[rank].world = 1;
    parts[rank].state = whole.state;
    parts[rank].ranks = {whole.ranks[rank]};
    parts[rank].files = {whole.files[rank]};
    for (Tensor tensor : whole.tensors) {
      std::erase_if(tensor.slices, [&](const Slice& slice) { return slice.file != rank; });
      for (Slice& slice : tensor.slices) slice.file = 0;
      if (!tensor.slices.empty() || tensor.name == "empty") parts[rank].tensors.push_back(tensor);
    }
    parts[rank] = Manifest::parse(parts[rank].text(), false);
  }
  const Manifest merged = Manifest::parse(merge(parts).text());
  EXPECT_EQ(merged.world, 2);
  EXPECT_EQ(merged.find("param/w")->slices.size(), 2U);
  EXPECT_EQ(merged.find("param/w")->slices[1].file, 1);
  EXPECT_NE(merged.find("param/empty"), nullptr);
}

}  // namespace
}  // namespace penstock::ckpt
