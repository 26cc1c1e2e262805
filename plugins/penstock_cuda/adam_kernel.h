#pragma once
// Adam and AdamW on the device: the arithmetic for one value, and what one thread does in a launch.
// update_value() computes line by line what AdamKernel of src/optim/kernels_update.cpp computes, so
// the bits are equal. The compiler must not fuse multiplications and additions by itself
// (-fmad=false, -ffp-contract=off); divisions and square roots must be correctly rounded.
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "plugins/penstock_cuda/values.h"
#include "runtime.h"

namespace penstock::fused {

// The settings of a step in the form in which the kernel uses them.
struct AdamFactors {
  float grad_scale, weight_decay, decay;
  float lerp, beta2, one_minus_beta2;
  float inverse_bias2_sqrt, eps, step_size;
  bool coupled, lerp_from_grad;
};

// torch.optim.AdamW / Adam: arXiv:1711.05101, arXiv:1412.6980.
PENSTOCK_FUSED_CODE void update_value(const AdamFactors& s, float grad, float& p, float& m,
                                      float& v) {
  float g = grad * s.grad_scale;
  g = fmaf(s.coupled ? p : 0.0F, s.weight_decay, g);
  p = p * s.decay;
  const float start = s.lerp_from_grad ? g : m;
  m = fmaf(s.lerp, g - m, start);
  const float square = s.one_minus_beta2 * g;
  v = fmaf(square, g, v * s.beta2);
  const float denom = fmaf(sqrtf(v), s.inverse_bias2_sqrt, s.eps);
  p = p - s.step_size * m / denom;
}

// A run whose dtypes are known to the kernel. `out` is null if the run has no output.
struct KernelRun {
  float* master;
  const void* grad;
  void* moment1;
  void* moment2;
  void* out;
  int64_t numel;
};

// A run is updated in quads, which begin at multiples of a quad's size in memory, so the first and
// the last quad of a run may be incomplete. A block of threads updates one chunk of quads. These
// sizes were chosen without measurements.
inline constexpr int kThreads = 256;
inline constexpr int64_t kChunkQuads = 2048;  // 8192 values

// The argument of a launch: runs with the same dtypes. CUDA and HIP allow 4096 bytes.
inline constexpr int kMaxRuns = 64;
inline constexpr int8_t kUnaligned = -1;
struct RunBatch {
  AdamFactors factors;
  const float* device_scale;
  const float* found_inf;
  int32_t num_runs;
  int32_t first_chunk[kMaxRuns + 1];  // of each run; then the number of chunks of all runs
  // Number of values between the beginning of a quad and the beginning of the run. kUnaligned if
  // this number differs between the run's arrays: then no quad can be read or written by one
  // instruction.
  int8_t phase[kMaxRuns];
  KernelRun runs[kMaxRuns];
};
static_assert(sizeof(RunBatch) <= 4096, "the argument of a launch is too large");

PENSTOCK_FUSED_CODE int64_t num_quads(int64_t numel, int phase) {
  return (numel + (phase > 0 ? phase : 0) + kLanes - 1) / kLanes;
}

// Returns the run to which a chunk belongs.
PENSTOCK_FUSED_CODE int run_of_chunk(const RunBatch& batch, int chunk) {
  int low = 0, high = batch.num_runs;  // first_chunk[low] <= chunk < first_chunk[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    const bool above = batch.first_chunk[middle] <= chunk;
    low = above ? middle : low;
    high = above ? high : middle;
  }
  return low;
}

template <class Grad, class Moment, class Out>
struct FusedAdamKernel {
  static constexpr int kThreads = fused::kThreads;
  static constexpr bool kHasOutput = !std::is_same_v<Out, NoParam>;

  // Updates up to four values. Each value is read and written by instructions of its own.
  static PENSTOCK_FUSED_CODE void update_values(const AdamFactors& s, const KernelRun& run,
                                                int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      Moment& moment1 = static_cast<Moment*>(run.moment1)[i];
      Moment& moment2 = static_cast<Moment*>(run.moment2)[i];
      float p = run.master[i], m = to_fp32(moment1), v = to_fp32(moment2);
      update_value(s, to_fp32(static_cast<const Grad*>(run.grad)[i]), p, m, v);
      run.master[i] = p;
      from_fp32(m, moment1);
      from_fp32(v, moment2);
      if constexpr (kHasOutput) from_fp32(p, static_cast<Out*>(run.out)[i]);
    }
  }

  // Updates four values. All reads are issued before the arithmetic, so they are in flight at the
  // same time.
  static PENSTOCK_FUSED_CODE void update_quad(const AdamFactors& s, const KernelRun& run,
                                              int64_t begin) {
    const auto grad = load_quad(static_cast<const Grad*>(run.grad) + begin);
    auto master = load_quad(run.master + begin);
    auto moment1 = load_quad(static_cast<const Moment*>(run.moment1) + begin);
    auto moment2 = load_quad(static_cast<const Moment*>(run.moment2) + begin);
    Quad<Out> out{};
    for (int lane = 0; lane < kLanes; ++lane) {
      float m = to_fp32(moment1.at[lane]), v = to_fp32(moment2.at[lane]);
      update_value(s, to_fp32(grad.at[lane]), master.at[lane], m, v);
      from_fp32(m, moment1.at[lane]);
      from_fp32(v, moment2.at[lane]);
      if constexpr (kHasOutput) from_fp32(master.at[lane], out.at[lane]);
    }
    store_quad(master, run.master + begin);
    store_quad(moment1, static_cast<Moment*>(run.moment1) + begin);
    store_quad(moment2, static_cast<Moment*>(run.moment2) + begin);
    if constexpr (kHasOutput) store_quad(out, static_cast<Out*>(run.out) + begin);
  }

  static PENSTOCK_FUSED_CODE void run_block(const RunBatch& batch, int block, int thread) {
    if (batch.found_inf != nullptr && *batch.found_inf != 0.0F) return;
    AdamFactors factors = batch.factors;
    if (batch.device_scale != nullptr) factors.grad_scale *= *batch.device_scale;
    const int index = run_of_chunk(batch, block);
    const KernelRun run = batch.runs[index];
    const int phase = batch.phase[index];
    const int64_t first = (block - batch.first_chunk[index]) * kChunkQuads;
    const int64_t last = num_quads(run.numel, phase);
    const int64_t end = first + kChunkQuads < last ? first + kChunkQuads : last;
    for (int64_t quad = first + thread; quad < end; quad += kThreads) {
      const int64_t begin = quad * kLanes - (phase > 0 ? phase : 0);
      if (phase != kUnaligned && begin >= 0 && begin + kLanes <= run.numel) {
        update_quad(factors, run, begin);
      } else {
        update_values(factors, run, begin > 0 ? begin : 0,
                      begin + kLanes < run.numel ? begin + kLanes : run.numel);
      }
    }
  }
};

}  // namespace penstock::fused
