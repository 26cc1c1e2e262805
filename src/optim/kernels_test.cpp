#include "src/optim/kernels.h"

#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <gtest/gtest.h>
#include <hwy/highway.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "penstock/error.h"
#include "src/device/host_kernels.h"
#include "src/device/on_target.h"
#include "src/device/sample_values.h"

namespace penstock::optim {
namespace {

using device::host::sum_squares;
using namespace samples;  // NOLINT(google-build-using-namespace)

// torch.optim.AdamW and Adam for one value, in double.
struct AdamReference {
  double p, m, v;
  void step(double g, const AdamOptions& o) {
    const double lr = o.lr, beta1 = o.beta1, beta2 = o.beta2, decay = o.weight_decay;
    g *= o.grad_scale;
    if (o.decoupled) {
      p *= 1 - lr * decay;
    } else {
      g += decay * p;
    }
    m += (1 - beta1) * (g - m);
    const int64_t squared = o.second_step == 0 ? o.step : o.second_step;
    const double bias1 = 1 - std::pow(beta1, o.step), bias2 = 1 - std::pow(beta2, squared);
    if (!o.keeps_second) {
      v = beta2 * v + (1 - beta2) * g * g;
    } else {
      const double bound = std::min(1.0, std::sqrt(1 - beta2) / (1 - beta1));
      v = std::max(v, std::pow(bound * m / bias1, 2) * bias2);
    }
    p -= lr / bias1 * m / (std::sqrt(v) / std::sqrt(bias2) + o.eps);
  }
};

void expect_near(double actual, double expected, double relative, const std::string& what) {
  EXPECT_NEAR(actual, expected, relative * std::abs(expected) + 1e-9) << what;
}

struct AdamCase {
  std::string name;
  AdamOptions options;
};

class AdamTest : public testing::TestWithParam<AdamCase> {};

TEST_P(AdamTest, MatchesDoubleForEveryGradientDtypeAndSize) {
  for (const Dtype grad_dtype : kDtypes) {
    for (const int64_t numel : kSizes) {
      AdamOptions options = GetParam().options;
      SampleValues master(Dtype::kFp32, numel), m(Dtype::kFp32, numel), v(Dtype::kFp32, numel);
      SampleValues grad(grad_dtype, numel), out(Dtype::kBf16, numel);
      master.randomize(1, -1, 1);
      m.randomize(0, 0, 0);
      v.randomize(0, 0, 0);
      std::vector<AdamReference> reference;
      for (int64_t i = 0; i < numel; ++i) reference.push_back({master[i], 0, 0});
      for (int step = 1; step <= 6; ++step) {
        options.step = step;
        options.keeps_second = step == 4 || step == 5;  // not in step 6
        options.second_step = std::min(step, 3) + (step == 6 ? 1 : 0);
        grad.randomize(static_cast<uint32_t>(step), -2, 2);
        // The second moment of the first value begins while the others are kept.
        if (step < 4 && numel > 0) grad.set(0, 0.0F);
        adam({master.floats(), grad.data(), grad_dtype, out.data(), Dtype::kBf16, numel},
             m.floats(), v.floats(), options);
        for (int64_t i = 0; i < numel; ++i) reference[i].step(grad[i], options);
      }
      for (int64_t i = 0; i < numel; i += 1 + numel / 999) {
        // Absolute tolerance: a weight near zero keeps the rounding errors of larger terms.
        EXPECT_NEAR(master[i], reference[i].p, 3e-7) << numel << " p " << i;
        EXPECT_NEAR(m[i], reference[i].m, 3e-7) << numel << " m " << i;
        expect_near(v[i], reference[i].v, 1e-6, "v");
        EXPECT_EQ(out[i], static_cast<float>(c10::BFloat16(master[i])));
      }
      EXPECT_TRUE(master.guard_intact() && m.guard_intact() && v.guard_intact() &&
                  out.guard_intact());
    }
  }
}

AdamOptions adam_options(float weight_decay, bool decoupled, float beta1 = 0.9F,
                         float grad_scale = 0.125F) {
  AdamOptions options;
  options.lr = 1e-2F;
  options.beta1 = beta1;
  options.eps = 1e-6F;
  options.weight_decay = weight_decay;
  options.decoupled = decoupled;
  options.grad_scale = grad_scale;
  return options;
}

INSTANTIATE_TEST_SUITE_P(Options, AdamTest,
                         testing::Values(AdamCase{"Plain", adam_options(0, true)},
                                         AdamCase{"AdamW", adam_options(0.1F, true)},
                                         AdamCase{"Adam", adam_options(0.1F, false)},
                                         AdamCase{"NoMomentum", adam_options(0, true, 0.0F)},
                                         AdamCase{"SmallBeta1", adam_options(0, true, 0.25F)}),
                         [](const auto& info) { return info.param.name; });

TEST(Adam, WritesEveryOutputDtype) {
  const int64_t numel = 1003;
  for (const Dtype dtype : kDtypes) {
    SampleValues master(Dtype::kFp32, numel), m(Dtype::kFp32, numel), v(Dtype::kFp32, numel);
    SampleValues grad(Dtype::kFp32, numel), out(dtype, numel), expected(dtype, numel);
    master.randomize(1, -1, 1);
    m.randomize(0, 0, 0);
    v.randomize(0, 0, 0);
    grad.randomize(2, -1, 1);
    adam({master.floats(), grad.data(), Dtype::kFp32, out.data(), dtype, numel}, m.floats(),
         v.floats(), {});
    for (int64_t i = 0; i < numel; ++i) expected.set(i, master[i]);
    EXPECT_TRUE(out.same_bits(expected)) << dtype_name(dtype);
    EXPECT_TRUE(out.guard_intact());
  }
}

// The number of threads, the split into ranges and the alignment do not change the bits. Large
// sizes use non-temporal stores; if they are split into smaller ranges, these use plain stores.
void check_cuts(Dtype moments) {
  struct Run {
    int threads;
    int64_t offset, piece;
  };
  const int64_t numel = 600011;
  std::vector<SampleValues> masters, outs;
  for (const Run run : {Run{1, 0, numel}, Run{2, 0, numel}, Run{3, 1, numel}, Run{2, 16, 100003},
                        Run{1, 5, 40961}, Run{1, 0, 7777}}) {
    const Threads threads(run.threads);
    SampleValues master(Dtype::kFp32, numel, run.offset), m(moments, numel, run.offset);
    SampleValues v(moments, numel, run.offset), grad(Dtype::kBf16, numel, run.offset);
    SampleValues out(Dtype::kBf16, numel, run.offset);
    master.randomize(1, -1, 1);
    m.randomize(2, -1, 1);
    v.randomize(3, 0, 1);
    grad.randomize(4, -1, 1);
    const AdamOptions options = adam_options(0.1F, true);
    for (int64_t at = 0; at < numel; at += run.piece) {
      adam({master.floats() + at, static_cast<uint16_t*>(grad.data()) + at, Dtype::kBf16,
            static_cast<uint16_t*>(out.data()) + at, Dtype::kBf16, std::min(run.piece, numel - at),
            moments},
           m.at(at), v.at(at), options);
    }
    masters.push_back(master);
    outs.push_back(out);
    EXPECT_TRUE(masters.front().same_bits(master)) << run.threads << " " << run.offset;
    EXPECT_TRUE(outs.front().same_bits(out)) << run.threads << " " << run.offset;
    EXPECT_TRUE(master.guard_intact() && out.guard_intact());
  }
}

TEST(Adam, BitsDoNotDependOnThreadsCutsOrAlignment) { check_cuts(Dtype::kFp32); }
TEST(Adam, NorWithBf16Moments) { check_cuts(Dtype::kBf16); }

// A weight without weight decay may be infinite (a mask); an unused weight decay must not make it
// NaN.
TEST(Adam, InfiniteWeightWithoutGradientStays) {
  for (const bool decoupled : {true, false}) {
    std::vector<float> p(20, -INFINITY), m(20, 0.0F), v(20, 0.0F), g(20, 0.0F);
    adam({p.data(), g.data(), Dtype::kFp32, nullptr, Dtype::kBf16, 20}, m.data(), v.data(),
         adam_options(0, decoupled));
    for (const float value : p) EXPECT_EQ(value, -INFINITY);
  }
}

TEST(Adam, StepZeroIsABug) {
  float value = 0;
  AdamOptions options;
  options.step = 0;
  EXPECT_THROW(
      adam({&value, &value, Dtype::kFp32, nullptr, Dtype::kBf16, 1}, &value, &value, options), Bug);
}

struct SgdReference {
  double p, buffer;
  void step(double g, const SgdOptions& o) {
    g = g * o.grad_scale + double(o.weight_decay) * p;
    if (o.momentum != 0) {
      buffer = o.first ? g : buffer * o.momentum + g * (1 - double(o.dampening));
      g = o.nesterov ? g + buffer * o.momentum : buffer;
    }
    p -= o.lr * g;
  }
};

struct SgdCase {
  std::string name;
  SgdOptions options;
};

class SgdTest : public testing::TestWithParam<SgdCase> {};

TEST_P(SgdTest, MatchesDouble) {
  for (const Dtype grad_dtype : kDtypes) {
    for (const int64_t numel : kSizes) {
      SgdOptions options = GetParam().options;
      options.grad_scale = 0.5F;
      SampleValues master(Dtype::kFp32, numel), buffer(Dtype::kFp32, numel),
          out(Dtype::kBf16, numel);
      SampleValues grad(grad_dtype, numel);
      master.randomize(1, -1, 1);
      buffer.randomize(9, NAN, NAN);  // `first` must not read them
      std::vector<SgdReference> reference;
      for (int64_t i = 0; i < numel; ++i) reference.push_back({master[i], 0});
      for (int step = 1; step <= 3; ++step) {
        options.first = step == 1;
        grad.randomize(static_cast<uint32_t>(step), -2, 2);
        sgd({master.floats(), grad.data(), grad_dtype, out.data(), Dtype::kBf16, numel},
            options.momentum == 0 ? nullptr : buffer.floats(), options);
        for (int64_t i = 0; i < numel; ++i) reference[i].step(grad[i], options);
      }
      for (int64_t i = 0; i < numel; i += 1 + numel / 999) {
        EXPECT_NEAR(master[i], reference[i].p, 3e-7) << numel << " p " << i;
        EXPECT_EQ(out[i], static_cast<float>(c10::BFloat16(master[i])));
        if (options.momentum == 0) continue;
        EXPECT_NEAR(buffer[i], reference[i].buffer, 5e-7);
      }
      EXPECT_TRUE(master.guard_intact() && buffer.guard_intact());
    }
  }
}

SgdOptions sgd_options(float momentum, float dampening, float weight_decay, bool nesterov) {
  SgdOptions options;
  options.lr = 0.1F;
  options.momentum = momentum;
  options.dampening = dampening;
  options.weight_decay = weight_decay;
  options.nesterov = nesterov;
  return options;
}

INSTANTIATE_TEST_SUITE_P(Options, SgdTest,
                         testing::Values(SgdCase{"Plain", sgd_options(0, 0, 0, false)},
                                         SgdCase{"Decay", sgd_options(0, 0, 0.1F, false)},
                                         SgdCase{"Momentum", sgd_options(0.9F, 0, 0, false)},
                                         SgdCase{"Dampened", sgd_options(0.9F, 0.2F, 0.1F, false)},
                                         SgdCase{"Nesterov", sgd_options(0.9F, 0, 0.1F, true)}),
                         [](const auto& info) { return info.param.name; });

struct LionReference {
  double p, m;
  void step(double g, const LionOptions& o) {
    g *= o.grad_scale;
    const double mixed = o.beta1 * m + (1 - o.beta1) * g;
    p = p * (1 - o.lr * o.weight_decay) - o.lr * (mixed > 0 ? 1 : mixed < 0 ? -1 : 0);
    m = o.beta2 * m + (1 - o.beta2) * g;
  }
};

struct AdagradReference {
  double p, sum;
  void step(double g, const AdagradOptions& o) {
    g = g * o.grad_scale + o.weight_decay * p;
    sum += g * g;
    const double lr = o.lr / (1 + static_cast<double>(o.step - 1) * o.lr_decay);
    p -= lr * g / (std::sqrt(sum) + o.eps);
  }
};

// Compares a kernel that has one moment to its formula in double.
template <class Reference, class Options, class Kernel>
void check_one_moment(Options options, const Kernel& kernel) {
  options.grad_scale = 0.5F;
  for (const Dtype grad_dtype : kDtypes) {
    for (const int64_t numel : kSizes) {
      SampleValues master(Dtype::kFp32, numel), moment(Dtype::kFp32, numel),
          out(Dtype::kBf16, numel);
      SampleValues grad(grad_dtype, numel);
      master.randomize(1, -1, 1);
      moment.randomize(2, 0, 0);
      std::vector<Reference> reference;
      for (int64_t i = 0; i < numel; ++i) reference.push_back({master[i], 0});
      for (int step = 1; step <= 3; ++step) {
        if constexpr (std::is_same_v<Options, AdagradOptions>) options.step = step;
        grad.randomize(static_cast<uint32_t>(step), -2, 2);
        if (numel > 5) write(grad.data(), grad_dtype, 5, 0.0F);
        kernel({master.floats(), grad.data(), grad_dtype, out.data(), Dtype::kBf16, numel},
               moment.floats(), options);
        for (int64_t i = 0; i < numel; ++i) reference[i].step(grad[i], options);
      }
      for (int64_t i = 0; i < numel; i += 1 + numel / 999) {
        EXPECT_NEAR(master[i], reference[i].p, 1e-6) << numel << " p " << i;
        EXPECT_EQ(out[i], static_cast<float>(c10::BFloat16(master[i])));
      }
      EXPECT_TRUE(master.guard_intact() && moment.guard_intact());
    }
  }
}

TEST(Lion, MatchesDouble) {
  for (const double decay : {0.0, 0.1}) {
    check_one_moment<LionReference>(LionOptions{.lr = 0.01, .weight_decay = decay}, lion);
  }
}

TEST(Adagrad, MatchesDouble) {
  for (const double decay : {0.0, 0.1}) {
    check_one_moment<AdagradReference>(
        AdagradOptions{.lr = 0.05, .lr_decay = decay, .eps = 1e-4, .weight_decay = decay}, adagrad);
  }
}

// The master weights and moments that a kernel writes. The moments begin as zeros.
struct Written {
  Written(int64_t numel, Dtype moments)
      : moments(moments), master(Dtype::kFp32, numel), m(moments, numel), v(moments, numel) {
    master.randomize(1, -1, 1);
    m.randomize(0, 0, 0);
    v.randomize(0, 0, 0);
  }
  void step(int kernel, const SampleValues& grad, Dtype dtype, int64_t numel, int step) {
    const Range range{master.floats(), grad.data(), dtype, nullptr, dtype, numel, moments};
    AdamOptions options = adam_options(0.1F, true);
    options.step = step;
    if (kernel == 0) adam(range, m.data(), v.data(), options);
    if (kernel == 1) sgd(range, m.data(), {.momentum = 0.9, .nesterov = true, .first = step == 1});
    if (kernel == 2) lion(range, m.data(), {});
  }
  Dtype moments;
  SampleValues master, m, v;
};

// Compares bf16 moments with the same kernel on fp32 moments, which are rounded after each step.
void check_bf16_moments(int64_t numel) {
  for (const int kernel : {0, 1, 2}) {
    for (const Dtype dtype : kDtypes) {
      Written ours(numel, Dtype::kBf16), wide(numel, Dtype::kFp32);
      for (int step = 1; step <= 3; ++step) {
        const SampleValues grad =
            SampleValues(dtype, numel).randomize(static_cast<uint32_t>(step), -2, 2);
        ours.step(kernel, grad, dtype, numel, step);
        wide.step(kernel, grad, dtype, numel, step);
        for (int64_t i = 0; i < numel; ++i) {
          wide.m.set(i, c10::BFloat16(wide.m[i]));
          wide.v.set(i, c10::BFloat16(wide.v[i]));
          ASSERT_TRUE(ours.m[i] == wide.m[i] && ours.v[i] == wide.v[i]) << kernel << " " << i;
        }
      }
      EXPECT_TRUE(ours.master.same_bits(wide.master) && ours.m.guard_intact()) << kernel;
    }
  }
}

TEST(Bf16Moments, AreRoundedFp32Moments) {
  for (const int64_t n : kSizes) check_bf16_moments(n);
}

TEST(Bf16Moments, NotWithAdagrad) {
  float value = 1;
  const Range range{&value, &value, Dtype::kFp32, nullptr, Dtype::kBf16, 1, Dtype::kBf16};
  EXPECT_THROW(adagrad(range, &value, {}), Bug);
}

// All tests above use the best instruction set of this machine; the tests below use each of its
// sets.
class TargetTest : public OnTarget<testing::TestWithParam<int64_t>> {};

TEST_P(TargetTest, CutsDoNotChangeBits) { check_cuts(Dtype::kFp32); }
TEST_P(TargetTest, NorWithBf16Moments) { check_cuts(Dtype::kBf16); }
TEST_P(TargetTest, Bf16MomentsAreRoundedFp32Moments) { check_bf16_moments(1003); }

TEST_P(TargetTest, AdamAndSumSquaresAgreeWithDouble) {
  SampleValues master(Dtype::kFp32, 1003), m(Dtype::kFp32, 1003), v(Dtype::kFp32, 1003);
  SampleValues grad(Dtype::kFp16, 1003);
  master.randomize(1, -1, 1);
  m.randomize(2, -1, 1);
  v.randomize(3, 0, 1);
  grad.randomize(4, -1, 1);
  const AdamOptions options = adam_options(0.1F, true);
  std::vector<AdamReference> reference;
  double sum = 0;
  for (int64_t i = 0; i < 1003; ++i) {
    reference.push_back({master[i], m[i], v[i]});
    reference.back().step(grad[i], options);
    sum += double(grad[i]) * double(grad[i]);
  }
  adam({master.floats(), grad.data(), Dtype::kFp16, nullptr, Dtype::kBf16, 1003}, m.floats(),
       v.floats(), options);
  for (int64_t i = 0; i < 1003; ++i) EXPECT_NEAR(master[i], reference[i].p, 3e-7) << i;
  EXPECT_NEAR(sum_squares(grad.data(), Dtype::kFp16, 1003), sum, 1e-12 * sum);
}

INSTANTIATE_TEST_SUITE_P(InstructionSets, TargetTest,
                         testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const auto& info) { return hwy::TargetName(info.param); });

}  // namespace
}  // namespace penstock::optim
