// The C functions that cpu_adam.py measures: our Adam pass, and an in-place loop over three fp32
// arrays as the physical limit. Compiled once per instruction set (foreach_target.h).
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "benchmarks/cpu_adam_kernels.cpp"
#include <hwy/foreach_target.h>

// After foreach_target.h.
#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <cstdint>
#include <vector>

#include "penstock/export.h"
#include "src/mem/arena.h"
#include "src/optim/kernels.h"
#include "src/optim/split.h"

HWY_BEFORE_NAMESPACE();
namespace penstock::bench::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// x = x * a + b in place over three arrays at once: reads and writes 24 bytes per index.
template <bool kStream>
HWY_NOINLINE void stream_loop(float* x, float* y, float* z, int64_t begin, int64_t end) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto a = hn::Set(d, 0.999F);
  const auto b = hn::Set(d, 1e-4F);
  for (int64_t i = begin; i + lanes <= end; i += lanes) {
    for (float* at : {x + i, y + i, z + i}) {
      hwy::Prefetch(reinterpret_cast<const char*>(at) + 2048);  // as in the kernel
      const auto value = hn::MulAdd(hn::LoadU(d, at), a, b);
      if constexpr (kStream) {
        hn::Stream(value, d, at);
      } else {
        hn::StoreU(value, d, at);
      }
    }
  }
  if constexpr (kStream) hwy::FlushStream();
}

void stream_part(float* x, float* y, float* z, int64_t begin, int64_t end) {
  stream_loop<true>(x, y, z, begin, end);
}

void plain_part(float* x, float* y, float* z, int64_t begin, int64_t end) {
  stream_loop<false>(x, y, z, begin, end);
}

}  // namespace penstock::bench::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace penstock::bench {

HWY_EXPORT(stream_part);
HWY_EXPORT(plain_part);

// Memory as the engine has it, until the process ends.
extern "C" PENSTOCK_API void* penstock_bench_take(int64_t bytes) {
  static mem::Pool pool{c10::Device(c10::DeviceType::CPU)};
  static mem::Arena arena{pool};
  static std::vector<mem::Lease> leases;
  leases.push_back(arena.take(bytes, mem::Account::kOptim));
  return leases.back().data();
}

// Arrays aligned to 64 bytes; non_temporal: 1 or 0.
extern "C" PENSTOCK_API void penstock_bench_stream(float* x, float* y, float* z, int64_t numel,
                                                   int non_temporal) {
  optim::for_each_part(numel, [&](int64_t begin, int64_t end) {
    if (non_temporal != 0) {
      HWY_DYNAMIC_DISPATCH(stream_part)(x, y, z, begin, end);
    } else {
      HWY_DYNAMIC_DISPATCH(plain_part)(x, y, z, begin, end);
    }
  });
}

// AdamW with torch's defaults: bf16 gradient in, fp32 master and moments, bf16 weights out.
extern "C" PENSTOCK_API void penstock_bench_adam(float* master, const void* grad, float* exp_avg,
                                                 float* exp_avg_sq, void* out, int64_t numel,
                                                 float grad_scale, int64_t step) {
  optim::AdamOptions options;
  options.weight_decay = 0.01F;
  options.grad_scale = grad_scale;
  options.step = step;
  optim::adam({master, grad, Dtype::kBf16, out, Dtype::kBf16, numel}, exp_avg, exp_avg_sq, options);
}

}  // namespace penstock::bench
#endif
