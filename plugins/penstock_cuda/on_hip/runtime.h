#pragma once
// Kernels on HIP (see on_cuda/runtime.h).
#include <hip/hip_runtime.h>

#define PENSTOCK_FUSED_CODE __host__ __device__ __forceinline__

namespace penstock::fused {

template <class Kernel, class Args>
__global__ void __launch_bounds__(Kernel::kThreads) run_kernel(const Args args) {
  Kernel::run_block(args, static_cast<int>(blockIdx.x), static_cast<int>(threadIdx.x));
}

// Queues `num_blocks` blocks of `Kernel`. Returns 0 or an error code of HIP.
template <class Kernel, class Args>
int launch(const Args& args, int num_blocks, void* stream) {
  void* arguments[] = {const_cast<Args*>(&args)};
  const hipError_t code =
      hipLaunchKernel(reinterpret_cast<const void*>(&run_kernel<Kernel, Args>),
                      dim3(static_cast<unsigned>(num_blocks)), dim3(Kernel::kThreads), arguments, 0,
                      static_cast<hipStream_t>(stream));
  // The caller gets the error, so torch's next check must not find it.
  if (code != hipSuccess) (void)hipGetLastError();
  return static_cast<int>(code);
}

// Returns 0 if the driver can load the plugin's code for the current device, else an error code.
template <class Kernel, class Args>
int check() {
  hipFuncAttributes attributes;
  const hipError_t code =
      hipFuncGetAttributes(&attributes, reinterpret_cast<const void*>(&run_kernel<Kernel, Args>));
  if (code != hipSuccess) (void)hipGetLastError();
  return static_cast<int>(code);
}

inline const char* runtime_error(int code) {
  return hipGetErrorString(static_cast<hipError_t>(code));
}

}  // namespace penstock::fused
