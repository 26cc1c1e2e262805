// The C functions that cpu_adam.py measures: our Adam pass, and an in-place loop over three fp32
// arrays as the physical limit. foreach_target.h compiles this file once per instruction set.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "benchmarks/cpu_adam_kernels.cpp"
#include <hwy/foreach_target.h>

// Must come after foreach_target.h.
#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <cstdint>
#include <vector>

#include "penstock/export.h"
#include "src/device/split.h"
#include "src/mem/arena.h"
#include "src/optim/kernels.h"

HWY_BEFORE_NAMESPACE();
namespace penstock::bench::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Computes x = x * a + b in place for three arrays, which reads and writes 24 bytes per index.
// Takes `chunk` values of each array in turn; the range must have a whole number of chunks. There
// is no software prefetch, because the hardware's was the fastest.
template <bool kStream>
HWY_NOINLINE void stream_loop(float* const (&arrays)[3], int64_t begin, int64_t end,
                              int64_t chunk) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto a = hn::Set(d, 0.999F);
  const auto b = hn::Set(d, 1e-4F);
  for (int64_t first = begin; first + chunk <= end; first += chunk) {
    for (float* array : arrays) {
      for (int64_t i = first; i < first + chunk; i += lanes) {
        const auto value = hn::MulAdd(hn::LoadU(d, array + i), a, b);
        if constexpr (kStream) {
          hn::Stream(value, d, array + i);
        } else {
          hn::StoreU(value, d, array + i);
        }
      }
    }
  }
  if constexpr (kStream) hwy::FlushStream();
}

// `kind`: 0: one vector of each array in turn; 1: the same with non-temporal stores; 2: 1 KiB of
// each.
void loop_part(float* x, float* y, float* z, int64_t begin, int64_t end, int kind) {
  const auto lanes = static_cast<int64_t>(hn::Lanes(hn::ScalableTag<float>()));
  float* const arrays[3] = {x, y, z};
  if (kind == 1) {
    stream_loop<true>(arrays, begin, end, lanes);
  } else {
    stream_loop<false>(arrays, begin, end, kind == 0 ? lanes : 256);
  }
}

}  // namespace penstock::bench::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace penstock::bench {

HWY_EXPORT(loop_part);

// Takes memory from an arena, as the engine does. The memory is freed when the process ends.
extern "C" PENSTOCK_API void* penstock_bench_take(int64_t bytes) {
  static mem::Pool pool;
  static mem::Arena arena{pool};
  static std::vector<mem::Lease> leases;
  leases.push_back(arena.take(bytes, mem::Account::kOptim));
  return leases.back().data().host();
}

// The arrays must be aligned to 64 bytes.
extern "C" PENSTOCK_API void penstock_bench_loop(float* x, float* y, float* z, int64_t numel,
                                                 int kind) {
  device::host::for_each_part(numel, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(loop_part)(x, y, z, begin, end, kind);
  });
}

// AdamW with torch's defaults: bf16 gradient in, fp32 master, fp32 or bf16 moments, bf16 weights
// out.
extern "C" PENSTOCK_API void penstock_bench_adam(float* master, const void* grad, void* exp_avg,
                                                 void* exp_avg_sq, void* out, int64_t numel,
                                                 int bf16_moments, float grad_scale, int64_t step) {
  optim::AdamOptions options;
  options.weight_decay = 0.01F;
  options.grad_scale = grad_scale;
  options.step = step;
  const Dtype moments = bf16_moments != 0 ? Dtype::kBf16 : Dtype::kFp32;
  optim::adam({master, grad, Dtype::kBf16, out, Dtype::kBf16, numel, moments}, exp_avg, exp_avg_sq,
              options);
}

}  // namespace penstock::bench
#endif
