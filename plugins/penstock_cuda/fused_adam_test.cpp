// The plugin's kernel, compiled for the host, against optim::adam on the CPU. If adam() runs on an
// instruction set with fused multiply-add, all bits are equal.
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <gtest/gtest.h>
#include <hwy/highway.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "penstock/error.h"
#include "plugins/penstock_cuda/values.h"
#include "src/base/text.h"
#include "src/device/on_target.h"
#include "src/device/sample_values.h"
#include "src/optim/fused_step.h"
#include "src/optim/kernels.h"

namespace penstock::optim {
namespace {

using namespace samples;  // NOLINT(google-build-using-namespace)

const FusedPlugin& plugin() {
  std::string why;
  static const std::optional<FusedPlugin> kPlugin = FusedPlugin::open(PENSTOCK_PLUGIN_ON_HOST, why);
  PENSTOCK_ASSERT(kPlugin.has_value(), why);
  return *kPlugin;
}

// Dtypes of a run. Without a value in `param` it has no output.
struct RunDtypes {
  Dtype grad = Dtype::kBf16, moment = Dtype::kFp32;
  std::optional<Dtype> param = Dtype::kBf16;
  std::string text() const {
    return concat(dtype_name(grad), " ", dtype_name(moment), " ", param ? dtype_name(*param) : "-");
  }
};

std::vector<RunDtypes> all_dtypes() {
  std::vector<RunDtypes> all;
  for (const Dtype grad : kDtypes) {
    for (const Dtype moment : {Dtype::kFp32, Dtype::kBf16}) {
      all.push_back({grad, moment, std::nullopt});
      for (const Dtype param : kDtypes) all.push_back({grad, moment, param});
    }
  }
  return all;
}

// How many values master, gradient, moments and output begin after a multiple of 16 bytes.
using Offsets = std::array<int64_t, 5>;

// The memory of one run.
class RunMemory {
 public:
  RunMemory(const RunDtypes& dtypes, int64_t numel, uint32_t seed, const Offsets& offsets = {})
      : dtypes_(dtypes),
        numel_(numel),
        master(Dtype::kFp32, numel, offsets[0]),
        grad(dtypes.grad, numel, offsets[1]),
        moment1(dtypes.moment, numel, offsets[2]),
        moment2(dtypes.moment, numel, offsets[3]),
        out(dtypes.param.value_or(Dtype::kFp32), numel, offsets[4]) {
    master.randomize(seed, -1, 1);
    grad.randomize(seed + 1, -2, 2);
    moment1.randomize(seed + 2, -1, 1);
    moment2.randomize(seed + 3, 0, 1);
    out.randomize(seed + 4, 5, 6);
  }
  PenstockFusedRun run() {
    return {master.floats(),
            grad.data(),
            moment1.data(),
            moment2.data(),
            dtypes_.param ? out.data() : nullptr,
            numel_,
            static_cast<int32_t>(dtypes_.grad),
            static_cast<int32_t>(dtypes_.moment),
            static_cast<int32_t>(dtypes_.param.value_or(Dtype::kFp32))};
  }
  void run_on_cpu(const AdamOptions& options) {
    adam({master.floats(), grad.data(), dtypes_.grad, dtypes_.param ? out.data() : nullptr,
          dtypes_.param.value_or(Dtype::kFp32), numel_, dtypes_.moment},
         moment1.data(), moment2.data(), options);
  }
  bool same_bits(const RunMemory& other) const {
    return master.same_bits(other.master) && grad.same_bits(other.grad) &&
           moment1.same_bits(other.moment1) && moment2.same_bits(other.moment2) &&
           out.same_bits(other.out);
  }
  bool guard_intact() const {
    return master.guard_intact() && grad.guard_intact() && moment1.guard_intact() &&
           moment2.guard_intact() && out.guard_intact();
  }

 private:
  RunDtypes dtypes_;
  int64_t numel_;

 public:
  SampleValues master, grad, moment1, moment2, out;
};

PenstockFusedAdam step_of(const AdamOptions& options) {
  return {options.lr,
          options.beta1,
          options.beta2,
          options.eps,
          options.weight_decay,
          options.step,
          options.decoupled ? 1 : 0,
          options.grad_scale,
          nullptr,
          nullptr};
}

std::vector<PenstockFusedRun> runs_of(std::vector<RunMemory>& memories) {
  std::vector<PenstockFusedRun> runs;
  for (RunMemory& memory : memories) runs.push_back(memory.run());
  return runs;
}

// Runs one step on both sides.
void expect_same(const RunMemory& start, const AdamOptions& options, const std::string& what) {
  RunMemory ours = start, expected = start;
  plugin().launch(std::vector{ours.run()}, step_of(options), nullptr);
  expected.run_on_cpu(options);
  ASSERT_TRUE(ours.same_bits(expected)) << what;
  ASSERT_TRUE(ours.guard_intact()) << what;
}

// Weight decay of both kinds, and the steps and scales that change how the bias is corrected.
std::vector<AdamOptions> all_options() {
  std::vector<AdamOptions> all;
  for (const bool decoupled : {false, true}) {
    for (const double weight_decay : {0.0, 0.1}) {
      for (const int64_t step : {1, 2, 1000}) {
        all.push_back({.lr = 1e-2,
                       .eps = 1e-6,
                       .weight_decay = weight_decay,
                       .decoupled = decoupled,
                       .grad_scale = step == 2 ? 1.0F : 1.0F / 3.0F,
                       .step = step});
      }
    }
  }
  all.push_back({.beta1 = 0.25, .beta2 = 0.5});  // here torch.lerp computes from the end
  all.push_back({.beta1 = 0.0, .weight_decay = 0.1, .grad_scale = 1024.0F, .step = 7});
  return all;
}

// Whether adam() uses fused multiply-add on the current instruction set. The weight decay times the
// weight is 1 + 2^-11 + 2^-24, whose last bit is lost if the product is rounded.
bool cpu_fuses() {
  float p = 1.0F + 0x1p-12F, m = 0.0F, v = 0.0F;
  const float grad = -(1.0F + 0x1p-11F);
  adam({&p, &grad, Dtype::kFp32, nullptr, Dtype::kFp32, 1}, &m, &v,
       {.weight_decay = 1.0 + 0x1p-12, .decoupled = false});
  return m != 0.0F;
}

class FusedAdam : public testing::Test {
 protected:
  void SetUp() override {
    if (!cpu_fuses()) {
      GTEST_SKIP() << "this processor has no fused multiply-add, so bits differ";
    }
  }
};

TEST_F(FusedAdam, HasTheBitsOfTheCpuForEveryDtypeOptionAndSize) {
  for (const RunDtypes& dtypes : all_dtypes()) {
    for (const AdamOptions& options : all_options()) {
      for (int64_t numel = 1; numel <= 70; ++numel) {
        const RunMemory start(dtypes, numel, static_cast<uint32_t>(numel));
        expect_same(start, options, concat(dtypes.text(), ", ", numel, " values"));
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(FusedAdam, HasTheBitsOfTheCpuForLargeSizes) {
  const AdamOptions options{.lr = 1e-2, .weight_decay = 0.1, .grad_scale = 0.3F, .step = 2};
  for (const RunDtypes& dtypes : all_dtypes()) {
    for (const int64_t numel : {1000, 8191, 8192, 8193, 65537}) {
      expect_same({dtypes, numel, 1}, options, concat(dtypes.text(), ", ", numel, " values"));
    }
  }
  for (const Offsets& offsets : {Offsets{}, Offsets{3, 3, 3, 3, 3}, Offsets{0, 1, 0, 0, 0}}) {
    expect_same({{}, 1000003, 1, offsets}, options, "1000003 values");
  }
}

// If all addresses lie equally far behind a multiple of a quad, the kernel updates quads between
// two edges; else it updates value by value.
TEST_F(FusedAdam, AlignmentDoesNotChangeBits) {
  const std::vector<Offsets> all = {{1, 1, 1, 1, 1}, {2, 2, 2, 2, 2}, {3, 3, 3, 3, 3},
                                    {5, 1, 9, 1, 5}, {4, 4, 4, 4, 4}, {0, 1, 2, 3, 1},
                                    {0, 0, 0, 0, 1}, {0, 2, 0, 0, 0}, {1, 1, 1, 2, 1}};
  const AdamOptions options{.lr = 1e-2, .weight_decay = 0.1, .step = 3};
  for (const RunDtypes& dtypes : all_dtypes()) {
    for (const Offsets& offsets : all) {
      for (const int64_t numel : {1, 2, 3, 4, 5, 6, 7, 8, 11, 33, 70, 8190, 8195}) {
        const RunMemory start(dtypes, numel, 9, offsets);
        expect_same(start, options,
                    concat(dtypes.text(), ", ", numel, " values, offset ", offsets[0]));
        if (HasFatalFailure()) return;
      }
    }
  }
}

// More runs than a launch takes, of several dtypes, sizes and alignments in any order.
TEST_F(FusedAdam, UpdatesManyRunsInOneCall) {
  const std::vector<RunDtypes> dtypes = all_dtypes();
  std::vector<RunMemory> ours;
  for (uint32_t i = 0; i < 1000; ++i) {
    const int64_t numel = i == 500 ? 100003 : i % 7 == 0 ? 0 : i * 37 % 600;
    const int64_t offset = i % 5;
    // Three quarters of the runs have the same dtypes and fill several launches.
    const RunDtypes& chosen = i % 4 == 0 ? dtypes[i / 4 % dtypes.size()] : RunDtypes{};
    ours.emplace_back(chosen, numel, i,
                      Offsets{offset, offset, offset, offset, offset + i % 3 / 2});
  }
  std::vector<RunMemory> expected = ours;
  const AdamOptions options{.lr = 1e-2, .weight_decay = 0.1, .grad_scale = 0.5F, .step = 4};
  plugin().launch(runs_of(ours), step_of(options), nullptr);
  for (size_t i = 0; i < ours.size(); ++i) {
    expected[i].run_on_cpu(options);
    ASSERT_TRUE(ours[i].same_bits(expected[i])) << "run " << i;
    ASSERT_TRUE(ours[i].guard_intact()) << "run " << i;
  }
}

TEST_F(FusedAdam, MultipliesGradientsByTheDevicesScale) {
  const float device = 0.7F;
  const RunMemory start({}, 1000, 1);
  AdamOptions options{.weight_decay = 0.1, .grad_scale = 1.0F / 3.0F};
  PenstockFusedAdam step = step_of(options);
  step.device_scale = &device;
  RunMemory ours = start, expected = start;
  plugin().launch(std::vector{ours.run()}, step, nullptr);
  options.grad_scale *= device;
  expected.run_on_cpu(options);
  EXPECT_TRUE(ours.same_bits(expected));
}

TEST_F(FusedAdam, ChangesNothingIfTheDeviceFoundInfinity) {
  for (const RunDtypes& dtypes : all_dtypes()) {
    for (const float found : {0.0F, 1.0F, INFINITY, NAN}) {
      const RunMemory start(dtypes, 1001, 1);
      PenstockFusedAdam step = step_of({});
      step.found_inf = &found;
      RunMemory ours = start;
      plugin().launch(std::vector{ours.run()}, step, nullptr);
      EXPECT_EQ(ours.same_bits(start), found != 0.0F) << dtypes.text() << " " << found;
    }
  }
}

// Infinite weights stay if nothing moves them, and a NaN in a gradient reaches all outputs.
TEST_F(FusedAdam, TreatsInfinityAndNanLikeTheCpu) {
  for (const Dtype param : {Dtype::kBf16, Dtype::kFp16}) {
    RunMemory start({Dtype::kFp32, Dtype::kBf16, param}, 12, 1);
    start.master.set(1, -INFINITY);
    start.master.set(2, 1e30F);
    start.master.set(3, -1e-7F);  // subnormal in fp16
    start.grad.set(4, 0.0F);
    start.moment1.set(4, 0.0F);
    start.moment2.set(4, 0.0F);
    expect_same(start, {}, "infinity");
    start.grad.set(5, NAN);
    RunMemory ours = start;
    plugin().launch(std::vector{ours.run()}, step_of({}), nullptr);
    EXPECT_TRUE(std::isnan(ours.master[5]) && std::isnan(ours.moment1[5]) &&
                std::isnan(ours.moment2[5]) && std::isnan(ours.out[5]));
    EXPECT_FALSE(std::isnan(ours.master[4]) || std::isnan(ours.master[6]));
  }
}

TEST(FusedAdamArguments, AreCheckedBeforeAnythingChanges) {
  const RunMemory start({}, 10, 1);
  const auto refuses = [&](const auto& spoil, const std::string& why) {
    std::vector<RunMemory> memories{start, start};
    std::vector<PenstockFusedRun> runs = runs_of(memories);
    PenstockFusedAdam step = step_of({});
    spoil(runs[1], step);
    try {
      plugin().launch(runs, step, nullptr);
      ADD_FAILURE() << "not refused: " << why;
    } catch (const RuntimeFault& fault) {
      EXPECT_NE(std::string(fault.what()).find(why), std::string::npos) << fault.what();
    }
    EXPECT_TRUE(memories[0].same_bits(start) && memories[1].same_bits(start)) << why;
  };
  using Run = PenstockFusedRun;
  using Step = PenstockFusedAdam;
  refuses([](Run& run, Step&) { run.grad = nullptr; }, "is null");
  refuses([](Run& run, Step&) { run.grad_dtype = 3; }, "combination of dtypes");
  refuses([](Run& run, Step&) { run.moment_dtype = kPenstockFusedFp16; }, "combination of dtypes");
  refuses([](Run& run, Step&) { run.param_dtype = -1; }, "combination of dtypes");
  refuses([](Run& run, Step&) { run.param_out = static_cast<char*>(run.param_out) + 1; },
          "not a multiple");
  refuses([](Run& run, Step&) { run.numel = -1; }, "less than 0 values");
  refuses([](Run& run, Step&) { run.numel = std::numeric_limits<int64_t>::max(); }, "more than");
  refuses([](Run&, Step& step) { step.step = 0; }, "step is less than 1");
}

// Without fused multiply-add, adam() rounds products, so values differ in their last bits. The
// bound holds for values up to 1 in size.
constexpr float kUnfusedBound = 3e-7F;

class FusedAdamOnTarget : public OnTarget<testing::TestWithParam<int64_t>> {};

TEST_P(FusedAdamOnTarget, AgreesWithTheCpu) {
  for (const AdamOptions& options : all_options()) {
    const RunMemory start({Dtype::kBf16, Dtype::kFp32, std::nullopt}, 1003, 1);
    if (cpu_fuses()) {
      expect_same(start, options, "fused");
      continue;
    }
    RunMemory ours = start, expected = start;
    plugin().launch(std::vector{ours.run()}, step_of(options), nullptr);
    expected.run_on_cpu(options);
    const float bound = kUnfusedBound * std::max(1.0F, options.grad_scale);
    for (int64_t i = 0; i < 1003; ++i) {
      ASSERT_NEAR(ours.master[i], expected.master[i], bound) << i;
      ASSERT_NEAR(ours.moment1[i], expected.moment1[i], bound) << i;
      ASSERT_NEAR(ours.moment2[i], expected.moment2[i], bound * std::max(1.0F, options.grad_scale))
          << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(InstructionSets, FusedAdamOnTarget,
                         testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const auto& info) { return hwy::TargetName(info.param); });

// Every 16-bit value, and fp32 values around the places where rounding changes.
TEST(FusedValues, AreConvertedLikeTorch) {
  for (uint32_t bits = 0; bits <= 0xFFFF; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    const auto same = [](float a, float b) {
      return std::isnan(a) ? std::isnan(b) : fused::bits_of(a) == fused::bits_of(b);
    };
    ASSERT_TRUE(same(fused::to_fp32(fused::Bf16{half}), from_bits(half, Dtype::kBf16))) << bits;
    ASSERT_TRUE(same(fused::to_fp32(fused::Fp16{half}), from_bits(half, Dtype::kFp16))) << bits;
  }
  for (uint64_t high = 0; high <= 0xFFFFFFFF; high += 0x1000) {
    for (const uint32_t low : {0u, 1u, 0x7FFu, 0x800u, 0x801u, 0xFFFu}) {
      const float value = fused::float_of(static_cast<uint32_t>(high) | low);
      fused::Bf16 bf16;
      fused::Fp16 fp16;
      fused::from_fp32(value, bf16);
      fused::from_fp32(value, fp16);
      if (std::isnan(value)) {
        ASSERT_TRUE(bf16.bits == 0x7FC0 && (fp16.bits & 0x7FFF) == 0x7E00) << high + low;
        continue;
      }
      ASSERT_EQ(bf16.bits, c10::BFloat16(value).x) << high + low;
      ASSERT_EQ(fp16.bits, c10::Half(value).x) << high + low;
    }
  }
}

}  // namespace
}  // namespace penstock::optim
