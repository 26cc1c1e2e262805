#pragma once
// Optimizer kernels over flat ranges on the CPU: one pass reads gradient and state once and writes
// state and the low-precision parameter once (28 bytes per parameter for a bf16 gradient in, fp32
// master and moments, bf16 parameter out). Stateless free functions, safe from any thread; the work
// is split over at::parallel_for. SIMD (Highway) is chosen at run time.
#include <cstdint>

#include "src/place/placement.h"

namespace penstock::optim {

// A contiguous range of one flat buffer. `master` is fp32 and updated in place. `param_out`, where
// not null, receives the updated value rounded to `param_dtype` (round to nearest even, the same
// bits as torch's cast). `grad` holds `grad_dtype` values and is not written. Moments are
// range.numel values of `moment_dtype`, updated in place: fp32, or bf16, where the step works with
// the new moments before they are rounded (to nearest even).
struct Range {
  float* master = nullptr;
  const void* grad = nullptr;
  Dtype grad_dtype = Dtype::kFp32;
  void* param_out = nullptr;
  Dtype param_dtype = Dtype::kBf16;
  int64_t numel = 0;
  Dtype moment_dtype = Dtype::kFp32;
};

struct AdamOptions {
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0.0;
  bool decoupled = true;    // AdamW (arXiv:1711.05101); false adds weight_decay * p to the gradient
  float grad_scale = 1.0F;  // unscale, average and clip, in one factor
  int64_t step = 1;         // 1 for the first update (bias correction, arXiv:1412.6980)
};
// Same formula and operation order as torch.optim.AdamW / Adam.
void adam(const Range& range, void* exp_avg, void* exp_avg_sq, const AdamOptions& options);

struct SgdOptions {
  double lr = 1e-3, momentum = 0.0, dampening = 0.0, weight_decay = 0.0;
  bool nesterov = false;
  float grad_scale = 1.0F;
  bool first = false;  // the momentum buffer is set to the gradient, as torch.optim.SGD does
};
// `momentum_buffer` may be null when momentum is 0.
void sgd(const Range& range, void* momentum_buffer, const SgdOptions& options);

struct LionOptions {
  double lr = 1e-4, beta1 = 0.9, beta2 = 0.99, weight_decay = 0.0;  // decoupled
  float grad_scale = 1.0F;
};
// arXiv:2302.06675, algorithm 2.
void lion(const Range& range, void* exp_avg, const LionOptions& options);

struct AdagradOptions {
  double lr = 1e-2, lr_decay = 0.0, eps = 1e-10, weight_decay = 0.0;
  float grad_scale = 1.0F;
  int64_t step = 1;  // 1 for the first update
};
// As torch.optim.Adagrad with initial_accumulator_value 0. `sum`: of squares, fp32 (in bf16 a sum
// that only grows would soon stand still).
void adagrad(const Range& range, float* sum, const AdagradOptions& options);

// Sum of squares in double, in a fixed order that does not depend on the number of threads.
// Inf or NaN anywhere makes the result not finite.
double sum_squares(const void* values, Dtype dtype, int64_t numel);

// First index of an Inf or NaN, or -1.
int64_t first_nonfinite(const void* values, Dtype dtype, int64_t numel);

// dst = src (accumulate false) or dst + src, converted; sums in fp32, one rounding.
void take(void* dst, Dtype dst_dtype, const void* src, Dtype src_dtype, int64_t numel,
          bool accumulate);

// take(), and whether every value of `src` is finite (dst is written all the same), in one pass.
[[nodiscard]] bool take_checked(void* dst, Dtype dst_dtype, const void* src, Dtype src_dtype,
                                int64_t numel, bool accumulate);

// Where `values` are not what `kept` rounds to, they were changed since, and `kept` becomes them.
// Elsewhere it keeps its lower bits.
void take_edits(void* kept, Dtype kept_dtype, const void* values, Dtype dtype, int64_t numel);
// The first such place, or -1.
[[nodiscard]] int64_t first_edit(const void* kept, Dtype kept_dtype, const void* values,
                                 Dtype dtype, int64_t numel);

}  // namespace penstock::optim
