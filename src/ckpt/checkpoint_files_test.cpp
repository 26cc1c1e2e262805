#include "penstock/checkpoint_files.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "penstock/error.h"

namespace penstock {
namespace {

namespace fs = std::filesystem;

class CheckpointFiles : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "penstock-files-XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    root_ = name;
  }
  void TearDown() override { fs::remove_all(root_); }

  std::string root_;
};

const std::vector<StoredTensor> kTensors = {{"param", "a", -1, {3, 5}},
                                            {"weight", "big", -1, {1 << 20, 3}, at::kBFloat16},
                                            {"weight", "tied", -1, {1 << 20, 3}, at::kBFloat16, 1},
                                            {"buffer", "none", -1, {0, 2}, at::kLong}};

TEST_F(CheckpointFiles, WhatIsWrittenIsRead) {
  const at::Tensor small = at::arange(15, at::kFloat).view({3, 5});
  const at::Tensor big = at::arange(3 << 20, at::kFloat).view({1 << 20, 3}).to(at::kBFloat16);
  CheckpointWriter writer(root_, "made", kTensors, {"{}", R"({"steps":3})", "{}"});
  writer.write(3, at::full({0, 2}, 0, at::kLong));
  writer.write(1, big);
  EXPECT_THROW(writer.write(1, big), ConfigError);
  EXPECT_THROW(writer.write(0, big), ConfigError);
  EXPECT_THROW(writer.commit(), ConfigError);
  writer.write(0, small.t().contiguous().t());
  EXPECT_EQ(writer.commit(), root_ + "/made");

  CheckpointReader reader(root_);
  reader.verify();
  EXPECT_EQ(reader.path(), root_ + "/made");
  EXPECT_EQ(reader.state().state, R"({"steps":3})");
  ASSERT_EQ(reader.tensors().size(), 4U);
  EXPECT_EQ(reader.tensors()[2].dtype, at::kBFloat16);
  EXPECT_TRUE(reader.read(0).equal(small));
  EXPECT_TRUE(reader.read(1).equal(big));
  EXPECT_TRUE(reader.read(2).equal(big));
  EXPECT_EQ(reader.read(3).sizes(), at::IntArrayRef({0, 2}));
}

TEST_F(CheckpointFiles, WhatIsNotCommittedLeavesNothing) {
  {
    const CheckpointWriter writer(root_, "made", kTensors, {});
  }
  EXPECT_TRUE(fs::is_empty(root_));
  EXPECT_THROW(CheckpointWriter(root_, "../x", kTensors, {}), ConfigError);
  EXPECT_THROW(CheckpointWriter(root_, "x", {{"param", "a", -1, {2}}, {"param", "a", -1, {2}}}, {}),
               ConfigError);
  EXPECT_THROW(CheckpointWriter(root_, "x", {{"param", "a", -1, {2}}}, {"[]", "{}", "{}"}),
               ConfigError);
  EXPECT_THROW(CheckpointReader{root_}, RuntimeFault);
  EXPECT_TRUE(fs::is_empty(root_));
}

TEST_F(CheckpointFiles, AHeadSaysWhereValuesAre) {
  const std::string json = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  std::string head(8, '\0');
  head[0] = static_cast<char>(json.size());
  const std::string path = root_ + "/x.safetensors";
  std::ofstream(path, std::ios::binary) << head << json << "12345678";
  const std::vector<SafetensorsEntry> entries = read_safetensors_head(path);
  ASSERT_EQ(entries.size(), 1U);
  EXPECT_EQ(entries[0].name, "a");
  EXPECT_EQ(entries[0].offset, static_cast<int64_t>(8 + json.size()));
  fs::resize_file(path, 20);
  EXPECT_THROW(read_safetensors_head(path), RuntimeFault);
  EXPECT_THROW(read_safetensors_head(root_ + "/none"), RuntimeFault);
}

}  // namespace
}  // namespace penstock
