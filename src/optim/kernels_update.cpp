// adam(), sgd(), lion() and adagrad(): one pass over gradient, master weights and moments. This
// file is compiled once per instruction set (foreach_target.h).
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/optim/kernels_update.cpp"
#include <hwy/foreach_target.h>

// Include after foreach_target.h.
#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/device/split.h"
#include "src/optim/kernels.h"
#include "src/simd/dtypes.h"

#ifndef PENSTOCK_OPTIM_UPDATE_ONCE_
#define PENSTOCK_OPTIM_UPDATE_ONCE_
namespace penstock::optim {

// The arguments of one call for the vector code of any instruction set.
struct StateVectors {
  Range range;
  void* moment1;  // exp_avg, momentum buffer
  void* moment2;  // exp_avg_sq
  bool stream;    // write param_out past the caches if its alignment allows
};

struct AdamScalars {
  float grad_scale, weight_decay, decay;
  float lerp, beta2, one_minus_beta2;
  float inverse_bias2_sqrt, eps, step_size, least_root;
  bool coupled, lerp_from_grad, keeps_second;
};

struct SgdScalars {
  float grad_scale, weight_decay, lr, momentum, one_minus_dampening;
  bool first, nesterov;
};

struct LionScalars {
  float grad_scale, decay, lr, beta1, one_minus_beta1, beta2, one_minus_beta2;
};

struct AdagradScalars {
  float grad_scale, weight_decay, lr, eps;
};

}  // namespace penstock::optim
#endif

HWY_BEFORE_NAMESPACE();
namespace penstock::optim::HWY_NAMESPACE {

namespace simd = penstock::HWY_NAMESPACE;
namespace hn = hwy::HWY_NAMESPACE;
using F32 = hn::CappedTag<float, 16>;  // at most one cache line
using Vec32 = hn::Vec<F32>;

struct NoOutput {};

// Pointers to the first value of a range. Moments are null if the kernel has none.
template <class GradType, class MomentType, class OutType>
struct Stretch {
  using Grad = GradType;
  using Moment = MomentType;
  using Out = OutType;
  float* master;
  Moment* moment1;
  Moment* moment2;
  const Grad* grad;
  Out* out;
};

// If kKeeps is set, the second moment is kept. It is raised only where the update would otherwise
// exceed the largest update of Adam (arXiv:1412.6980, 2.1), until the update equals that bound.
template <bool kKeeps>
struct AdamKernel {
  static constexpr int kMoments = 2;
  AdamScalars s;

  // torch.optim.AdamW / Adam: arXiv:1711.05101, arXiv:1412.6980.
  HWY_INLINE void operator()(F32 d, Vec32 grad, Vec32& p, Vec32& m, Vec32& v) const {
    const auto coupled = hn::Eq(hn::Set(d, s.coupled ? 1.0F : 0.0F), hn::Set(d, 1.0F));
    const auto from_grad = hn::Eq(hn::Set(d, s.lerp_from_grad ? 1.0F : 0.0F), hn::Set(d, 1.0F));
    auto g = hn::Mul(grad, hn::Set(d, s.grad_scale));
    g = hn::MulAdd(hn::IfThenElseZero(coupled, p), hn::Set(d, s.weight_decay), g);
    p = hn::Mul(p, hn::Set(d, s.decay));
    const auto start = hn::IfThenElse(from_grad, g, m);
    m = hn::MulAdd(hn::Set(d, s.lerp), hn::Sub(g, m), start);
    if constexpr (kKeeps) {
      const auto least = hn::Mul(hn::Abs(m), hn::Set(d, s.least_root));
      v = hn::IfThenElse(hn::Gt(least, hn::Sqrt(v)), hn::Mul(least, least), v);
    } else {
      const auto square = hn::Mul(hn::Set(d, s.one_minus_beta2), g);
      v = hn::MulAdd(square, g, hn::Mul(v, hn::Set(d, s.beta2)));
    }
    const auto root = hn::Sqrt(v);
    const auto denom = hn::MulAdd(root, hn::Set(d, s.inverse_bias2_sqrt), hn::Set(d, s.eps));
    p = hn::Sub(p, hn::Div(hn::Mul(hn::Set(d, s.step_size), m), denom));
  }
};

template <bool kMomentum>
struct SgdKernel {
  static constexpr int kMoments = kMomentum ? 1 : 0;
  SgdScalars s;

  HWY_INLINE void operator()(F32 d, Vec32 grad, Vec32& p, Vec32& buffer, Vec32&) const {
    const auto decays = hn::Ne(hn::Set(d, s.weight_decay), hn::Zero(d));
    auto g = hn::Mul(grad, hn::Set(d, s.grad_scale));
    g = hn::MulAdd(hn::IfThenElseZero(decays, p), hn::Set(d, s.weight_decay), g);
    if constexpr (kMomentum) {
      const auto momentum = hn::Set(d, s.momentum);
      const auto first = hn::Eq(hn::Set(d, s.first ? 1.0F : 0.0F), hn::Set(d, 1.0F));
      const auto nesterov = hn::Eq(hn::Set(d, s.nesterov ? 1.0F : 0.0F), hn::Set(d, 1.0F));
      const auto damped = hn::Mul(g, hn::Set(d, s.one_minus_dampening));
      buffer = hn::IfThenElse(first, g, hn::MulAdd(buffer, momentum, damped));
      g = hn::IfThenElse(nesterov, hn::MulAdd(buffer, momentum, g), buffer);
    }
    p = hn::NegMulAdd(hn::Set(d, s.lr), g, p);
  }
};

// arXiv:2302.06675, algorithm 2. sign(0) is 0, so the weight must not change if the direction is 0.
struct LionKernel {
  static constexpr int kMoments = 1;
  LionScalars s;

  HWY_INLINE void operator()(F32 d, Vec32 grad, Vec32& p, Vec32& m, Vec32&) const {
    const auto g = hn::Mul(grad, hn::Set(d, s.grad_scale));
    const auto mixed =
        hn::MulAdd(m, hn::Set(d, s.beta1), hn::Mul(g, hn::Set(d, s.one_minus_beta1)));
    const auto moves = hn::Ne(mixed, hn::Zero(d));
    const auto step = hn::IfThenElseZero(moves, hn::CopySign(hn::Set(d, s.lr), mixed));
    p = hn::Sub(hn::Mul(p, hn::Set(d, s.decay)), step);
    m = hn::MulAdd(m, hn::Set(d, s.beta2), hn::Mul(g, hn::Set(d, s.one_minus_beta2)));
  }
};

struct AdagradKernel {
  static constexpr int kMoments = 1;
  AdagradScalars s;

  HWY_INLINE void operator()(F32 d, Vec32 grad, Vec32& p, Vec32& sum, Vec32&) const {
    const auto decays = hn::Ne(hn::Set(d, s.weight_decay), hn::Zero(d));
    auto g = hn::Mul(grad, hn::Set(d, s.grad_scale));
    g = hn::MulAdd(hn::IfThenElseZero(decays, p), hn::Set(d, s.weight_decay), g);
    sum = hn::MulAdd(g, g, sum);
    const auto denom = hn::Add(hn::Sqrt(sum), hn::Set(d, s.eps));
    p = hn::Sub(p, hn::Div(hn::Mul(g, hn::Set(d, s.lr)), denom));
  }
};

// Updates one vector at offset `i`. The state was just read, so its lines are in the cache and a
// plain store is fastest (a non-temporal store halved the speed). The output is written without
// being read, so it gains from a non-temporal store.
template <bool kStream, class Kernel, class At>
HWY_INLINE void update_vector(const Kernel& kernel, const At& at, int64_t i) {
  const F32 d;
  const auto grad = simd::load_fp32(d, at.grad + i);
  auto p = hn::LoadU(d, at.master + i);
  auto moment1 = hn::Zero(d);
  auto moment2 = hn::Zero(d);
  if constexpr (Kernel::kMoments > 0) moment1 = simd::load_fp32(d, at.moment1 + i);
  if constexpr (Kernel::kMoments > 1) moment2 = simd::load_fp32(d, at.moment2 + i);
  kernel(d, grad, p, moment1, moment2);
  hn::StoreU(p, d, at.master + i);
  if constexpr (Kernel::kMoments > 0) simd::store_fp32<false>(d, moment1, at.moment1 + i);
  if constexpr (Kernel::kMoments > 1) simd::store_fp32<false>(d, moment2, at.moment2 + i);
  if constexpr (!std::is_same_v<typename At::Out, NoOutput>) {
    simd::store_fp32<kStream>(d, p, at.out + i);
  }
}

// Updates fewer values than a vector holds. Runs the same vector code on a copy, so the place where
// a range is cut does not change the result.
template <class Kernel, class At>
HWY_NOINLINE void update_partial(const Kernel& kernel, const At& at, int64_t begin, int64_t count) {
  using Grad = typename At::Grad;
  using Moment = typename At::Moment;
  using Out = typename At::Out;
  constexpr size_t kLanes = hn::MaxLanes(F32());
  HWY_ALIGN float master[kLanes] = {};
  HWY_ALIGN Moment moment1[kLanes] = {}, moment2[kLanes] = {};
  HWY_ALIGN Grad grad[kLanes] = {};
  HWY_ALIGN Out out[kLanes] = {};
  const auto values = static_cast<size_t>(count);
  std::memcpy(grad, at.grad + begin, values * sizeof(Grad));
  std::memcpy(master, at.master + begin, values * sizeof(float));
  if constexpr (Kernel::kMoments > 0)
    std::memcpy(moment1, at.moment1 + begin, values * sizeof(Moment));
  if constexpr (Kernel::kMoments > 1)
    std::memcpy(moment2, at.moment2 + begin, values * sizeof(Moment));
  update_vector<false>(kernel, At{master, moment1, moment2, grad, out}, 0);
  std::memcpy(at.master + begin, master, values * sizeof(float));
  if constexpr (Kernel::kMoments > 0)
    std::memcpy(at.moment1 + begin, moment1, values * sizeof(Moment));
  if constexpr (Kernel::kMoments > 1)
    std::memcpy(at.moment2 + begin, moment2, values * sizeof(Moment));
  if constexpr (!std::is_same_v<Out, NoOutput>) {
    std::memcpy(at.out + begin, out, values * sizeof(Out));
  }
}

// Updates whole vectors, then the remaining values.
template <class Kernel, class At>
void update_edge(const Kernel& kernel, const At& at, int64_t begin, int64_t end) {
  const auto lanes = static_cast<int64_t>(hn::Lanes(F32()));
  for (; begin + lanes <= end; begin += lanes) update_vector<false>(kernel, at, begin);
  if (begin < end) update_partial(kernel, at, begin, end - begin);
}

// Number of values in one cache line of the output. The loop below fills one line at a time.
constexpr int64_t kLineBytes = 64;
template <class Out>
constexpr int64_t kLineValues = kLineBytes / (std::is_same_v<Out, NoOutput> ? 2 : sizeof(Out));

// Prefetch distance into the second-level cache. On huge pages the hardware prefetches equally
// well. A distance of 2048 bytes, or a prefetch into the first-level cache, made the loop a tenth
// slower (Zen 4).
constexpr int64_t kPrefetchBytes = 1024;

template <int64_t kValues, class T>
HWY_INLINE void prefetch_values(const T* from) {
  constexpr auto kBytes = kValues * static_cast<int64_t>(sizeof(T));
  for (int64_t at = 0; at < kBytes; at += kLineBytes) {
    __builtin_prefetch(reinterpret_cast<const char*>(from) + kPrefetchBytes + at, 0, 2);
  }
}

// Updates whole cache lines. Returns where it stopped: less than one line before `end`.
template <bool kStream, class Kernel, class At>
HWY_NOINLINE int64_t update_lines(const Kernel kernel, const At at, int64_t begin, int64_t end) {
  constexpr int64_t kValues = kLineValues<typename At::Out>;
  const auto lanes = static_cast<int64_t>(hn::Lanes(F32()));
  int64_t line = begin;
  for (; line + kValues <= end; line += kValues) {
    prefetch_values<kValues>(at.grad + line);
    prefetch_values<kValues>(at.master + line);
    if constexpr (Kernel::kMoments > 0) prefetch_values<kValues>(at.moment1 + line);
    if constexpr (Kernel::kMoments > 1) prefetch_values<kValues>(at.moment2 + line);
    for (int64_t i = 0; i < kValues; i += lanes) update_vector<kStream>(kernel, at, line + i);
  }
  if constexpr (kStream) hwy::FlushStream();
  return line;
}

// With streaming stores, the values before the first cache line boundary of the output are updated
// separately.
template <class Kernel, class At>
void update_part(const Kernel& kernel, const At& at, bool stream, int64_t begin, int64_t end) {
  const auto out = reinterpret_cast<intptr_t>(at.out + begin);
  constexpr auto kSize = static_cast<int64_t>(sizeof(typename At::Out));
  if (stream && out % kSize == 0) {
    const int64_t head =
        std::min((kLineBytes - out % kLineBytes) % kLineBytes / kSize, end - begin);
    update_edge(kernel, at, begin, begin + head);
    begin = update_lines<true>(kernel, at, begin + head, end);
  } else {
    begin = update_lines<false>(kernel, at, begin, end);
  }
  update_edge(kernel, at, begin, end);
}

template <class Moment, class Kernel>
void update(const Kernel& kernel, const StateVectors& state, int64_t begin, int64_t end) {
  const Range& range = state.range;
  simd::visit_dtype(range.grad_dtype, [&](auto grad_type) {
    using Grad = typename decltype(grad_type)::type;
    const auto run = [&](auto out_type) {
      using Out = typename decltype(out_type)::type;
      const Stretch<Grad, Moment, Out> at{
          range.master, static_cast<Moment*>(state.moment1), static_cast<Moment*>(state.moment2),
          static_cast<const Grad*>(range.grad), static_cast<Out*>(range.param_out)};
      update_part(kernel, at, state.stream, begin, end);
    };
    if (range.param_out == nullptr) {
      run(simd::TypeOf<NoOutput>());
    } else {
      simd::visit_dtype(range.param_dtype, run);
    }
  });
}

template <class Kernel>
void update_moments(const Kernel& kernel, const StateVectors& state, int64_t begin, int64_t end) {
  if (state.range.moment_dtype == Dtype::kBf16) {
    update<simd::Bf16>(kernel, state, begin, end);
  } else {
    update<float>(kernel, state, begin, end);
  }
}

void adam_part(const AdamScalars& scalars, const StateVectors& state, int64_t begin, int64_t end) {
  if (scalars.keeps_second) {
    update_moments(AdamKernel<true>{scalars}, state, begin, end);
  } else {
    update_moments(AdamKernel<false>{scalars}, state, begin, end);
  }
}

void lion_part(const LionScalars& scalars, const StateVectors& state, int64_t begin, int64_t end) {
  update_moments(LionKernel{scalars}, state, begin, end);
}

void adagrad_part(const AdagradScalars& scalars, const StateVectors& state, int64_t begin,
                  int64_t end) {
  update<float>(AdagradKernel{scalars}, state, begin, end);
}

void sgd_part(const SgdScalars& scalars, const StateVectors& state, int64_t begin, int64_t end) {
  if (state.moment1 == nullptr) {
    update<float>(SgdKernel<false>{scalars}, state, begin, end);
  } else {
    update_moments(SgdKernel<true>{scalars}, state, begin, end);
  }
}

}  // namespace penstock::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace penstock::optim {
namespace {

HWY_EXPORT(adam_part);
HWY_EXPORT(sgd_part);
HWY_EXPORT(lion_part);
HWY_EXPORT(adagrad_part);

// Non-temporal stores avoid reading lines that would not stay in the cache.
constexpr int64_t kStreamAboveBytes = 8 << 20;

bool should_stream(const Range& range, int num_moments) {
  if (range.param_out == nullptr) return false;
  const int64_t bytes = dtype_bytes(range.grad_dtype) + dtype_bytes(range.param_dtype) +
                        int64_t{sizeof(float)} + num_moments * dtype_bytes(range.moment_dtype);
  return range.numel > kStreamAboveBytes / bytes;
}

void check_moments(const Range& range) {
  PENSTOCK_ASSERT(range.moment_dtype != Dtype::kFp16, "no kernel supports fp16 moments");
}

// Computes bias corrections and differences from 1 in double, as torch does in Python.
AdamScalars adam_scalars(const AdamOptions& options) {
  const double lr = options.lr;
  const double beta1 = options.beta1;
  const double beta2 = options.beta2;
  const auto step = static_cast<double>(options.step);
  const auto second_step = static_cast<double>(options.second_step);
  const double bias1 = 1.0 - std::pow(beta1, step);
  const double bias2 = 1.0 - std::pow(beta2, options.second_step == 0 ? step : second_step);
  AdamScalars s{};
  s.grad_scale = static_cast<float>(options.grad_scale);
  s.coupled = !options.decoupled && options.weight_decay != 0;
  s.weight_decay = s.coupled ? static_cast<float>(options.weight_decay) : 0.0F;
  s.decay = options.decoupled ? static_cast<float>(1.0 - lr * options.weight_decay) : 1.0F;
  s.lerp_from_grad = 1.0 - beta1 >= 0.5;  // for such weights, torch.lerp computes from the end
  s.lerp = static_cast<float>(s.lerp_from_grad ? -beta1 : 1.0 - beta1);
  s.keeps_second = options.keeps_second;
  s.least_root = static_cast<float>(least_root(beta1, beta2) / bias1 * std::sqrt(bias2));
  s.beta2 = static_cast<float>(beta2);
  s.one_minus_beta2 = static_cast<float>(1.0 - beta2);
  s.inverse_bias2_sqrt = static_cast<float>(1.0 / std::sqrt(bias2));
  s.eps = static_cast<float>(options.eps);
  s.step_size = static_cast<float>(lr / bias1);
  return s;
}

}  // namespace

void adam(const Range& range, void* exp_avg, void* exp_avg_sq, const AdamOptions& options) {
  check_moments(range);
  PENSTOCK_ASSERT(options.step >= 1,
                  concat("adam() got step ", options.step, "; steps begin at 1"));
  const AdamScalars scalars = adam_scalars(options);
  const StateVectors state{range, exp_avg, exp_avg_sq, should_stream(range, 2)};
  device::host::for_each_part(range.numel, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(adam_part)(scalars, state, begin, end);
  });
}

void sgd(const Range& range, void* momentum_buffer, const SgdOptions& options) {
  check_moments(range);
  PENSTOCK_ASSERT(options.momentum == 0 || momentum_buffer != nullptr,
                  "momentum without a momentum buffer");
  const SgdScalars scalars{static_cast<float>(options.grad_scale),
                           static_cast<float>(options.weight_decay),
                           static_cast<float>(options.lr),
                           static_cast<float>(options.momentum),
                           static_cast<float>(1.0 - static_cast<double>(options.dampening)),
                           options.first,
                           options.nesterov};
  const bool momentum = options.momentum != 0;
  const StateVectors state{range, momentum ? momentum_buffer : nullptr, nullptr,
                           should_stream(range, momentum ? 1 : 0)};
  device::host::for_each_part(range.numel, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(sgd_part)(scalars, state, begin, end);
  });
}

void lion(const Range& range, void* exp_avg, const LionOptions& options) {
  check_moments(range);
  const LionScalars scalars{options.grad_scale,
                            static_cast<float>(1.0 - options.lr * options.weight_decay),
                            static_cast<float>(options.lr),
                            static_cast<float>(options.beta1),
                            static_cast<float>(1.0 - options.beta1),
                            static_cast<float>(options.beta2),
                            static_cast<float>(1.0 - options.beta2)};
  const StateVectors state{range, exp_avg, nullptr, should_stream(range, 1)};
  device::host::for_each_part(range.numel, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(lion_part)(scalars, state, begin, end);
  });
}

void adagrad(const Range& range, float* sum, const AdagradOptions& options) {
  PENSTOCK_ASSERT(options.step >= 1,
                  concat("adagrad() got step ", options.step, "; steps begin at 1"));
  PENSTOCK_ASSERT(range.moment_dtype == Dtype::kFp32, "adagrad() needs an fp32 sum");
  const double lr = options.lr / (1.0 + static_cast<double>(options.step - 1) * options.lr_decay);
  const AdagradScalars scalars{options.grad_scale, static_cast<float>(options.weight_decay),
                               static_cast<float>(lr), static_cast<float>(options.eps)};
  const StateVectors state{range, sum, nullptr, should_stream(range, 1)};
  device::host::for_each_part(range.numel, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(adagrad_part)(scalars, state, begin, end);
  });
}

}  // namespace penstock::optim
#endif
