#include "src/optim/fused_step.h"

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "penstock/error.h"
#include "src/device/device.h"

namespace penstock::optim {
namespace {

using testing::ExitedWithCode;

void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << text;
}

// A device "cuda" whose memory is that of the host. The tests use the plugin's build for the host.
struct HostAsCuda : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::kCUDA;
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return {c10::kCUDA, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device where) const override {
    return c10::Stream(c10::Stream::DEFAULT, where);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  void* getStreamNativeHandle(c10::Stream) const override { return nullptr; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};
C10_REGISTER_GUARD_IMPL(CUDA, HostAsCuda)

struct HooksOfHostAsCuda : at::CUDAHooksInterface {
  explicit HooksOfHostAsCuda(at::CUDAHooksArgs) {}
  void init() const override {}
};

}  // namespace
}  // namespace penstock::optim

namespace at {
// torch makes its hooks from the class with this name.
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, penstock::optim::HooksOfHostAsCuda)
}  // namespace at

namespace penstock::optim {
namespace {

// Sets this process's plugin. It is opened when it is first needed.
void choose_plugin(const char* path) { setenv("PENSTOCK_CUDA_PLUGIN", path, /*replace=*/1); }

// A run of three values, and its memory.
struct SmallRun {
  float master[3] = {1, 2, 3}, grad[3] = {1, -1, 0}, moment1[3] = {}, moment2[3] = {};
  StepRun run(const device::Device* device) {
    Range range;
    range.master = master;
    range.grad = grad;
    range.numel = 3;
    range.device = device;
    return {range, moment1, moment2};
  }
  bool changed() const { return master[0] != 1.0F; }
};

OptimizerConfig adamw() { return {.type = OptimizerType::kAdamW, .lr = 0.1}; }

TEST(FusedPlugin, OfThisVersionIsOpened) {
  std::string why;
  const auto plugin = FusedPlugin::open(PENSTOCK_PLUGIN_ON_HOST, why);
  ASSERT_TRUE(plugin.has_value()) << why;
  EXPECT_EQ(plugin->why_not_here(), "");
}

TEST(FusedPlugin, SaysWhyAFileCannotBeUsed) {
  std::string why;
  EXPECT_FALSE(FusedPlugin::open("/nowhere/libpenstock_cuda.so", why));
  expect_contains(why, "/nowhere/libpenstock_cuda.so");
  EXPECT_FALSE(FusedPlugin::open(PENSTOCK_PLUGIN_OF_NEXT_VERSION, why));
  expect_contains(why, "version 99");
  EXPECT_FALSE(FusedPlugin::open("libm.so.6", why));
  expect_contains(why, "penstock_fused_version");
}

TEST(RunFused, UpdatesRunsOnCudaWithThePluginOfTheVariable) {
  choose_plugin(PENSTOCK_PLUGIN_ON_HOST);
  const device::Device cuda(c10::Device(c10::kCUDA, 0));
  SmallRun ours[2], expected;
  const std::vector<StepRun> runs = {ours[0].run(&cuda), ours[1].run(&cuda)};
  ASSERT_TRUE(run_fused(adamw(), runs, {.host = 0.5F}, 1));
  const StepRun same = expected.run(nullptr);
  adam(same.range, same.moment1, same.moment2,
       {.lr = 0.1, .weight_decay = adamw().weight_decay, .grad_scale = 0.5F});
  for (const SmallRun& one : ours) {
    for (int i = 0; i < 3; ++i) {
      EXPECT_NEAR(one.master[i], expected.master[i], 3e-7);
      EXPECT_NEAR(one.moment2[i], expected.moment2[i], 3e-7);
    }
  }
}

// Every setting has a value of its own, so that a mix-up changes the result.
TEST(RunFused, EverySettingArrives) {
  choose_plugin(PENSTOCK_PLUGIN_ON_HOST);
  const device::Device cuda(c10::Device(c10::kCUDA, 0));
  for (const bool decoupled : {false, true}) {
    SmallRun ours, expected;
    OptimizerConfig group{.type = decoupled ? OptimizerType::kAdamW : OptimizerType::kAdam,
                          .lr = 0.03,
                          .betas = {0.7, 0.6},
                          .eps = 0.02,
                          .weight_decay = 0.2};
    const float scale = 0.25F, found_inf = 0.0F;
    const FusedScale both{.host = 3.0F, .device = &scale, .found_inf = &found_inf};
    ASSERT_TRUE(run_fused(group, std::vector{ours.run(&cuda)}, both, 5));
    const StepRun same = expected.run(nullptr);
    adam(same.range, same.moment1, same.moment2, {0.03, 0.7, 0.6, 0.02, 0.2, decoupled, 0.75F, 5});
    for (int i = 0; i < 3; ++i) {
      EXPECT_NEAR(ours.master[i], expected.master[i], 1e-6);
      EXPECT_NEAR(ours.moment1[i], expected.moment1[i], 1e-6);
      EXPECT_NEAR(ours.moment2[i], expected.moment2[i], 1e-6);
    }
  }
}

TEST(RunFused, ChangesNothingIfTheDeviceFoundInfinity) {
  choose_plugin(PENSTOCK_PLUGIN_ON_HOST);
  const device::Device cuda(c10::Device(c10::kCUDA, 0));
  SmallRun run;
  const float found_inf = 1.0F;
  EXPECT_TRUE(run_fused(adamw(), std::vector{run.run(&cuda)}, {.found_inf = &found_inf}, 1));
  EXPECT_FALSE(run.changed());
}

TEST(RunFused, LeavesOtherWorkToTheCaller) {
  choose_plugin(PENSTOCK_PLUGIN_ON_HOST);
  const device::Device cuda(c10::Device(c10::kCUDA, 0));
  SmallRun run;
  EXPECT_FALSE(run_fused(adamw(), std::vector{run.run(nullptr)}, {}, 1));
  EXPECT_FALSE(run_fused(adamw(), std::vector{run.run(&device::Device::host())}, {}, 1));
  EXPECT_FALSE(run_fused(adamw(), {}, {}, 1));
  EXPECT_FALSE(run_fused({.type = OptimizerType::kLion}, std::vector{run.run(&cuda)}, {}, 1));
  EXPECT_FALSE(run.changed());
}

TEST(RunFused, SaysWhichStepFailed) {
  choose_plugin(PENSTOCK_PLUGIN_ON_HOST);
  const device::Device cuda(c10::Device(c10::kCUDA, 0));
  SmallRun run;
  StepRun wrong = run.run(&cuda);
  wrong.moment2 = nullptr;
  try {
    run_fused(adamw(), std::vector{wrong}, {}, 7);
    ADD_FAILURE() << "no error";
  } catch (const RuntimeFault& fault) {
    expect_contains(fault.what(), "1 runs in step 7");
    expect_contains(fault.what(), "is null");
  }
}

// Prints and counts torch's warnings.
class WarningCounter : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override {
    std::fprintf(stderr, "%s\n", warning.msg().c_str());
    ++count_;
  }
  int count() const { return count_; }

 private:
  int count_ = 0;
};

constexpr int kRan = 100;

// For a new process: calls run_fused() twice with this plugin (null: the variable is not set), and
// exits with the number of warnings, or kRan.
[[noreturn]] void run_twice(const char* plugin) {
  unsetenv("PENSTOCK_CUDA_PLUGIN");
  if (plugin != nullptr) choose_plugin(plugin);
  WarningCounter warnings;
  c10::WarningUtils::set_warning_handler(&warnings);
  const device::Device cuda(c10::Device(c10::kCUDA, 0));
  SmallRun run;
  const std::vector<StepRun> runs = {run.run(&cuda)};
  const bool ran = run_fused(adamw(), runs, {}, 1) && run_fused(adamw(), runs, {}, 2);
  std::exit(ran && run.changed() ? kRan : warnings.count());  // NOLINT(concurrency-mt-unsafe)
}

class PluginOfProcess : public testing::Test {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
};

TEST_F(PluginOfProcess, IsNotMissedIfThereIsNone) {
  EXPECT_EXIT(run_twice(nullptr), ExitedWithCode(0), "");
}

TEST_F(PluginOfProcess, IsNotOpenedIfTheVariableIsEmpty) {
  EXPECT_EXIT(run_twice(""), ExitedWithCode(0), "");
}

TEST_F(PluginOfProcess, IsFoundNextToTheLibrary) {
  const auto here = std::filesystem::read_symlink("/proc/self/exe").parent_path();
  const auto link = here / "libpenstock_cuda.so";
  std::filesystem::remove(link);
  std::filesystem::create_symlink(PENSTOCK_PLUGIN_ON_HOST, link);
  EXPECT_EXIT(run_twice(nullptr), ExitedWithCode(kRan), "");
  std::filesystem::remove(link);
}

TEST_F(PluginOfProcess, WarnsOnceIfTheChosenFileIsMissing) {
  EXPECT_EXIT(run_twice("/nowhere.so"), ExitedWithCode(1),
              "/nowhere.so is not used: .*No such file");
}

TEST_F(PluginOfProcess, WarnsOnceIfTheVersionDiffers) {
  EXPECT_EXIT(run_twice(PENSTOCK_PLUGIN_OF_NEXT_VERSION), ExitedWithCode(1),
              "is not used: it has version 99");
}

TEST_F(PluginOfProcess, WarnsOnceIfItHasNoCodeForTheDevice) {
  EXPECT_EXIT(run_twice(PENSTOCK_PLUGIN_WITHOUT_CODE), ExitedWithCode(1),
              "is not used on cuda:0: no kernel image");
}

}  // namespace
}  // namespace penstock::optim
