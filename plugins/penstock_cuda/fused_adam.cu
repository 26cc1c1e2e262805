// The functions that libpenstock_cuda.so exports (src/optim/fused_plugin.h): groups the runs of a
// step by dtypes and queues one kernel per 64 runs.
#include <cmath>
#include <cstdint>
#include <iterator>

#include "plugins/penstock_cuda/adam_kernel.h"
#include "plugins/penstock_cuda/values.h"
#include "runtime.h"
#include "src/optim/fused_plugin.h"

#define PENSTOCK_FUSED_EXPORT extern "C" __attribute__((visibility("default")))

namespace penstock::fused {
namespace {

// Errors of the arguments. Codes of the runtime are positive.
enum ArgumentError : int {
  kNullAddress = -1,
  kUnknownDtype = -2,
  kMisaligned = -3,
  kWrongStep = -4,
  kWrongSize = -5,
};

// As adam_scalars() of src/optim/kernels_update.cpp: bias corrections and differences from 1 are
// computed in double.
AdamFactors factors_of(const PenstockFusedAdam& adam) {
  const auto step = static_cast<double>(adam.step);
  const double bias1 = 1.0 - std::pow(adam.beta1, step);
  const double bias2 = 1.0 - std::pow(adam.beta2, step);
  const bool decoupled = adam.decoupled != 0;
  AdamFactors s{};
  s.grad_scale = adam.grad_scale;
  s.coupled = !decoupled && adam.weight_decay != 0;
  s.weight_decay = s.coupled ? static_cast<float>(adam.weight_decay) : 0.0F;
  s.decay = decoupled ? static_cast<float>(1.0 - adam.lr * adam.weight_decay) : 1.0F;
  s.lerp_from_grad = 1.0 - adam.beta1 >= 0.5;  // for such weights, torch.lerp computes from the end
  s.lerp = static_cast<float>(s.lerp_from_grad ? -adam.beta1 : 1.0 - adam.beta1);
  s.beta2 = static_cast<float>(adam.beta2);
  s.one_minus_beta2 = static_cast<float>(1.0 - adam.beta2);
  s.inverse_bias2_sqrt = static_cast<float>(1.0 / std::sqrt(bias2));
  s.eps = static_cast<float>(adam.eps);
  s.step_size = static_cast<float>(adam.lr / bias1);
  return s;
}

// The kernel of one combination of dtypes.
struct KernelRow {
  int grad, moment, param;  // PenstockFusedDtype; kNoParam: no output
  int (*launch)(const RunBatch& batch, int num_blocks, void* stream);
};
constexpr int kNoParam = -1;

template <class Grad, class Moment, class Out>
constexpr auto kLaunch = &launch<FusedAdamKernel<Grad, Moment, Out>, RunBatch>;

constexpr int kFp32 = kPenstockFusedFp32, kBf16 = kPenstockFusedBf16, kFp16 = kPenstockFusedFp16;
constexpr KernelRow kKernels[] = {
    {kFp32, kFp32, kNoParam, kLaunch<float, float, NoParam>},
    {kFp32, kFp32, kFp32, kLaunch<float, float, float>},
    {kFp32, kFp32, kBf16, kLaunch<float, float, Bf16>},
    {kFp32, kFp32, kFp16, kLaunch<float, float, Fp16>},
    {kFp32, kBf16, kNoParam, kLaunch<float, Bf16, NoParam>},
    {kFp32, kBf16, kFp32, kLaunch<float, Bf16, float>},
    {kFp32, kBf16, kBf16, kLaunch<float, Bf16, Bf16>},
    {kFp32, kBf16, kFp16, kLaunch<float, Bf16, Fp16>},
    {kBf16, kFp32, kNoParam, kLaunch<Bf16, float, NoParam>},
    {kBf16, kFp32, kFp32, kLaunch<Bf16, float, float>},
    {kBf16, kFp32, kBf16, kLaunch<Bf16, float, Bf16>},
    {kBf16, kFp32, kFp16, kLaunch<Bf16, float, Fp16>},
    {kBf16, kBf16, kNoParam, kLaunch<Bf16, Bf16, NoParam>},
    {kBf16, kBf16, kFp32, kLaunch<Bf16, Bf16, float>},
    {kBf16, kBf16, kBf16, kLaunch<Bf16, Bf16, Bf16>},
    {kBf16, kBf16, kFp16, kLaunch<Bf16, Bf16, Fp16>},
    {kFp16, kFp32, kNoParam, kLaunch<Fp16, float, NoParam>},
    {kFp16, kFp32, kFp32, kLaunch<Fp16, float, float>},
    {kFp16, kFp32, kBf16, kLaunch<Fp16, float, Bf16>},
    {kFp16, kFp32, kFp16, kLaunch<Fp16, float, Fp16>},
    {kFp16, kBf16, kNoParam, kLaunch<Fp16, Bf16, NoParam>},
    {kFp16, kBf16, kFp32, kLaunch<Fp16, Bf16, float>},
    {kFp16, kBf16, kBf16, kLaunch<Fp16, Bf16, Bf16>},
    {kFp16, kBf16, kFp16, kLaunch<Fp16, Bf16, Fp16>},
};

bool fits(const KernelRow& row, const PenstockFusedRun& run) {
  const bool same_param = run.param_out == nullptr
                              ? row.param == kNoParam
                              : row.param != kNoParam && row.param == run.param_dtype;
  return row.grad == run.grad_dtype && row.moment == run.moment_dtype && same_param;
}

// An address of a run and the size of its values.
struct RunAddress {
  const void* at;
  int dtype;
  uintptr_t value() const { return reinterpret_cast<uintptr_t>(at); }
  uintptr_t size() const { return dtype == kPenstockFusedFp32 ? 4 : 2; }
};

struct RunAddresses {
  explicit RunAddresses(const PenstockFusedRun& run)
      : all{{run.master, kFp32},
            {run.grad, run.grad_dtype},
            {run.moment1, run.moment_dtype},
            {run.moment2, run.moment_dtype},
            {run.param_out, run.param_dtype}},
        count(run.param_out == nullptr ? 4 : 5) {}
  const RunAddress* begin() const { return all; }
  const RunAddress* end() const { return all + count; }
  RunAddress all[5];
  int count;
};

int8_t phase_of(const PenstockFusedRun& run) {
  const auto phase = [](const RunAddress& address) {
    return static_cast<int8_t>(address.value() / address.size() % kLanes);
  };
  const int8_t first = phase({run.master, kFp32});
  for (const RunAddress& address : RunAddresses(run)) {
    if (phase(address) != first) return kUnaligned;
  }
  return first;
}

constexpr int64_t kMostChunks = INT32_MAX;  // of a launch

int64_t chunks_of(const PenstockFusedRun& run) {
  return (num_quads(run.numel, phase_of(run)) + kChunkQuads - 1) / kChunkQuads;
}

int check_run(const PenstockFusedRun& run) {
  if (run.numel < 0 || run.numel / (kChunkQuads * kLanes) >= kMostChunks) return kWrongSize;
  if (run.numel == 0) return 0;
  const RunAddresses addresses(run);
  for (const RunAddress& address : addresses) {
    if (address.at == nullptr) return kNullAddress;
    if (address.value() % address.size() != 0) return kMisaligned;
  }
  for (const KernelRow& row : kKernels) {
    if (fits(row, run)) return 0;
  }
  return kUnknownDtype;
}

// The runs of the next launch.
class NextLaunch {
 public:
  NextLaunch(const PenstockFusedAdam& adam, void* stream) : stream_(stream) {
    batch_.factors = factors_of(adam);
    batch_.device_scale = adam.device_scale;
    batch_.found_inf = adam.found_inf;
  }
  // Queues the runs so far if the run does not fit in.
  int add(const KernelRow& row, const PenstockFusedRun& run) {
    const int64_t chunks = chunks_of(run);
    if (batch_.num_runs == kMaxRuns || num_chunks() + chunks > kMostChunks) {
      if (const int code = queue(row)) return code;
    }
    const int index = batch_.num_runs++;
    batch_.runs[index] = {run.master, run.grad, run.moment1, run.moment2, run.param_out, run.numel};
    batch_.phase[index] = phase_of(run);
    batch_.first_chunk[index + 1] = batch_.first_chunk[index] + static_cast<int32_t>(chunks);
    return 0;
  }
  int queue(const KernelRow& row) {
    const int code = num_chunks() == 0 ? 0 : row.launch(batch_, num_chunks(), stream_);
    batch_.num_runs = 0;
    return code;
  }

 private:
  int32_t num_chunks() const { return batch_.first_chunk[batch_.num_runs]; }

  RunBatch batch_{};
  void* stream_;
};

int update_runs(const PenstockFusedRun* runs, int64_t num_runs, NextLaunch& next) {
  for (const KernelRow& row : kKernels) {
    for (const PenstockFusedRun* run = runs; run != runs + num_runs; ++run) {
      if (run->numel == 0 || !fits(row, *run)) continue;
      if (const int code = next.add(row, *run)) return code;
    }
    if (const int code = next.queue(row)) return code;
  }
  return 0;
}

}  // namespace
}  // namespace penstock::fused

PENSTOCK_FUSED_EXPORT int penstock_fused_version() { return PENSTOCK_FUSED_VERSION; }

PENSTOCK_FUSED_EXPORT int penstock_fused_check() {
  using namespace penstock::fused;  // NOLINT(google-build-using-namespace)
  return check<FusedAdamKernel<Bf16, float, Bf16>, RunBatch>();
}

PENSTOCK_FUSED_EXPORT int penstock_fused_launch(const PenstockFusedRun* runs, int64_t num_runs,
                                                const PenstockFusedAdam* adam, void* stream) {
  using namespace penstock::fused;  // NOLINT(google-build-using-namespace)
  if (adam->step < 1) return kWrongStep;
  for (int64_t i = 0; i < num_runs; ++i) {
    if (const int code = check_run(runs[i])) return code;
  }
  NextLaunch next(*adam, stream);
  return update_runs(runs, num_runs, next);
}

PENSTOCK_FUSED_EXPORT const char* penstock_fused_error(int code) {
  using namespace penstock::fused;  // NOLINT(google-build-using-namespace)
  switch (code) {
    case kNullAddress:
      return "an address of a run is null";
    case kUnknownDtype:
      return "a run has a combination of dtypes without a kernel";
    case kMisaligned:
      return "an address of a run is not a multiple of the size of its values";
    case kWrongStep:
      return "the step is less than 1";
    case kWrongSize:
      return "a run has less than 0 values, or more than a launch can update";
    default:
      return runtime_error(code);
  }
}
