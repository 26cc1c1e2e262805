#include "src/ckpt/weights_file.h"

#include <unistd.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "penstock/error.h"

namespace penstock {
namespace {

namespace fs = std::filesystem;

class WeightsFiles : public testing::Test {
 protected:
  void SetUp() override {
    std::string folder = (fs::temp_directory_path() / "weights_XXXXXX").string();
    folder_ = mkdtemp(folder.data());
    path_ = folder_ + "/w";
    write(values_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  void write(const at::Tensor& values) const {
    std::ofstream file(path_, std::ios::binary);
    file << "head";
    file.write(static_cast<const char*>(values.data_ptr()),
               static_cast<std::streamsize>(values.nbytes()));
  }

  std::string folder_, path_;
  const at::Tensor values_ = at::arange(600'000, at::kFloat).div_(3);
};

TEST_F(WeightsFiles, APartIsConvertedAsByCopy) {
  const WeightsFile file(path_);
  for (const at::ScalarType into : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
    const at::Tensor read = at::empty({500'000}, into);
    file.read(4 + 70'000 * 4, 500'000, at::kFloat, into, read.data_ptr());
    EXPECT_TRUE(read.equal(values_.narrow(0, 70'000, 500'000).to(into)));
  }
}

TEST_F(WeightsFiles, AFileThatEndsOrChangesIsAnError) {
  const WeightsFile file(path_);
  const uint64_t print = file.print();
  const at::Tensor read = at::empty({8}, at::kFloat);
  EXPECT_THROW(file.read(values_.numel() * 4, 8, at::kFloat, at::kFloat, read.data_ptr()),
               RuntimeFault);
  write(values_.add(1));
  fs::last_write_time(path_, fs::file_time_type::clock::now() + std::chrono::seconds(5));
  EXPECT_THROW(file.read(4, 8, at::kFloat, at::kFloat, read.data_ptr()), RuntimeFault);
  EXPECT_NE(WeightsFile(path_).print(), print);
  EXPECT_THROW(WeightsFile(folder_ + "/none"), RuntimeFault);
}

TEST_F(WeightsFiles, AnUnlinkedFileIsStillRead) {
  const WeightsFile file(path_);
  fs::remove(path_);
  const at::Tensor read = at::empty({8}, at::kFloat);
  file.read(4, 8, at::kFloat, at::kFloat, read.data_ptr());
  EXPECT_TRUE(read.equal(values_.narrow(0, 0, 8)));
}

}  // namespace
}  // namespace penstock
