// torch.autocast("sim"): registers torch's own lists of operators that run in lower precision, run
// in fp32 or promote their inputs.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace {

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {  // torch's macros need the name m
#define PENSTOCK_SIM_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define PENSTOCK_SIM_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define PENSTOCK_SIM_FP32_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define PENSTOCK_SIM_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(PENSTOCK_SIM_LOWER)
  AT_FORALL_FP32(PENSTOCK_SIM_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(PENSTOCK_SIM_FP32_DTYPE)
  AT_FORALL_PROMOTE(PENSTOCK_SIM_PROMOTE)
}

}  // namespace
