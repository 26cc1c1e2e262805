/* The C interface between the engine and the optional plugin libpenstock_cuda.so, which updates
 * the parameters of Adam and AdamW on a GPU in one pass over memory. The engine does not link the
 * plugin: src/optim/fused_step.cpp opens it at run time. A change of this file needs a new version
 * number, because the two sides may be built at different times. */
#pragma once
#include <stdint.h>

#define PENSTOCK_FUSED_VERSION 1

#ifdef __cplusplus
extern "C" {
#endif

/* The codes of dtypes equal those of penstock::Dtype. */
enum PenstockFusedDtype {
  kPenstockFusedFp32 = 0,
  kPenstockFusedBf16 = 1,
  kPenstockFusedFp16 = 2,
};

/* A contiguous range of a flat, as penstock::optim::Range. All addresses are in the memory of the
 * device. Each address is a multiple of the size of its values. The kernel is fastest if all
 * addresses are multiples of 16, or if all are the same number of values past a multiple of 16. */
struct PenstockFusedRun {
  float* master;      /* updated in place */
  const void* grad;   /* grad_dtype; only read */
  void* moment1;      /* moment_dtype, fp32 or bf16; updated in place */
  void* moment2;      /* moment_dtype; updated in place */
  void* param_out;    /* receives the new master in param_dtype; null: no output */
  int64_t numel;      /* 0 is allowed */
  int32_t grad_dtype; /* the three dtypes are values of enum PenstockFusedDtype */
  int32_t moment_dtype;
  int32_t param_dtype; /* ignored if param_out is null */
};

/* One step of Adam or AdamW, with the formulas of penstock::optim::adam. The gradient is multiplied
 * by grad_scale * *device_scale, a product in fp32. */
struct PenstockFusedAdam {
  double lr, beta1, beta2, eps, weight_decay;
  int64_t step;              /* 1 for the first update */
  int32_t decoupled;         /* 0: Adam, else AdamW */
  float grad_scale;          /* known to the host */
  const float* device_scale; /* in the memory of the device; null: a factor of 1 */
  const float* found_inf; /* on the device; a value other than 0 prevents the update. May be null */
};

/* The functions that the plugin exports. Any thread may call them. The thread's current device owns
 * the memory and the stream. Check and launch return 0 on success; for any other code,
 * penstock_fused_error returns a text that stays valid. */
typedef int (*PenstockFusedVersion)(void);
/* Checks whether the kernels can run on the thread's current device. */
typedef int (*PenstockFusedCheck)(void);
/* Queues the update on `stream` (a cudaStream_t or hipStream_t) and returns. The arrays are read
 * before the function returns. If the arguments are wrong, nothing is queued. */
typedef int (*PenstockFusedLaunch)(const struct PenstockFusedRun* runs, int64_t num_runs,
                                   const struct PenstockFusedAdam* adam, void* stream);
typedef const char* (*PenstockFusedError)(int code);

#define PENSTOCK_FUSED_VERSION_SYMBOL "penstock_fused_version"
#define PENSTOCK_FUSED_CHECK_SYMBOL "penstock_fused_check"
#define PENSTOCK_FUSED_LAUNCH_SYMBOL "penstock_fused_launch"
#define PENSTOCK_FUSED_ERROR_SYMBOL "penstock_fused_error"

#ifdef __cplusplus
}
#endif
