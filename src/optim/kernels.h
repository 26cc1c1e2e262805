#pragma once
// Optimizer kernels over flat ranges on the CPU. A kernel makes one pass, which reads gradient and
// state once, and writes state and the low-precision parameter once. With a bf16 gradient, fp32
// master and moments, and a bf16 parameter, a pass moves 28 bytes per parameter. Stateless free
// functions, callable from any thread. The work is split with at::parallel_for. The SIMD
// instruction set (Highway) is chosen at run time.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "src/device/address.h"
#include "src/place/placement.h"

namespace penstock::optim {

// A contiguous range of one flat. `master` is fp32 and updated in place. `param_out`, if not null,
// receives the updated value rounded to `param_dtype` (round to nearest even, the same bits as
// torch's cast). `grad` has values of `grad_dtype` and is only read. Each moment has `numel` values
// of `moment_dtype` (fp32 or bf16) and is updated in place. With bf16 moments, the step uses the
// new moments before they are rounded (to nearest even).
struct Range {
  float* master = nullptr;
  const void* grad = nullptr;
  Dtype grad_dtype = Dtype::kFp32;
  void* param_out = nullptr;
  Dtype param_dtype = Dtype::kBf16;
  int64_t numel = 0;
  Dtype moment_dtype = Dtype::kFp32;
  const device::Device* device = nullptr;  // owner of the memory; null: the host
};

struct AdamOptions {
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0.0;
  bool decoupled = true;    // AdamW (arXiv:1711.05101); false adds weight_decay * p to the gradient
  float grad_scale = 1.0F;  // product of unscaling, averaging and clipping factors
  int64_t step = 1;         // 1 for the first update (bias correction, arXiv:1412.6980)
  // Number of updates of the second moment, for its bias correction; 0: the same as `step`. If
  // `keeps_second` is true, this call does not update the second moment.
  int64_t second_step = 0;
  bool keeps_second = false;
};
// Same formula and operation order as torch.optim.AdamW / Adam.
void adam(const Range& range, void* exp_avg, void* exp_avg_sq, const AdamOptions& options);

// Returns the least ratio of the second moment's square root to the first moment's magnitude, both
// bias-corrected. No run of Adam has a smaller ratio (arXiv:1412.6980, section 2.1).
inline double least_root(double beta1, double beta2) {
  return std::min(1.0, std::sqrt(1.0 - beta2) / std::max(1e-12, 1.0 - beta1));
}

struct SgdOptions {
  double lr = 1e-3, momentum = 0.0, dampening = 0.0, weight_decay = 0.0;
  bool nesterov = false;
  float grad_scale = 1.0F;
  bool first = false;  // true: sets the momentum buffer to the gradient, as torch.optim.SGD does
};
// `momentum_buffer` may be null if momentum is 0.
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
// Same as torch.optim.Adagrad with initial_accumulator_value 0. `sum` is the sum of squares. It is
// fp32, because it only grows, and a bf16 sum would soon stop changing.
void adagrad(const Range& range, float* sum, const AdagradOptions& options);

}  // namespace penstock::optim
