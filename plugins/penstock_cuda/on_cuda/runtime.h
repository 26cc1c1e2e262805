#pragma once
// Kernels on CUDA. The files on_cuda, on_hip and on_host/runtime.h declare the same names; the
// build picks one of the folders. A kernel is a class with kThreads, the number of threads of a
// block, and a function run_block(args, block, thread) for one thread.
#include <cuda_runtime.h>

#define PENSTOCK_FUSED_CODE __host__ __device__ __forceinline__

namespace penstock::fused {

template <class Kernel, class Args>
__global__ void __launch_bounds__(Kernel::kThreads) run_kernel(const __grid_constant__ Args args) {
  Kernel::run_block(args, static_cast<int>(blockIdx.x), static_cast<int>(threadIdx.x));
}

// Queues `num_blocks` blocks of `Kernel`. Returns 0 or an error code of CUDA.
template <class Kernel, class Args>
int launch(const Args& args, int num_blocks, void* stream) {
  void* arguments[] = {const_cast<Args*>(&args)};
  const cudaError_t code =
      cudaLaunchKernel(reinterpret_cast<const void*>(&run_kernel<Kernel, Args>),
                       dim3(static_cast<unsigned>(num_blocks)), dim3(Kernel::kThreads), arguments,
                       0, static_cast<cudaStream_t>(stream));
  // The caller gets the error, so torch's next check must not find it.
  if (code != cudaSuccess) (void)cudaGetLastError();
  return static_cast<int>(code);
}

// Returns 0 if the driver can load the plugin's code for the current device, else an error code.
template <class Kernel, class Args>
int check() {
  cudaFuncAttributes attributes;
  const cudaError_t code =
      cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(&run_kernel<Kernel, Args>));
  if (code != cudaSuccess) (void)cudaGetLastError();
  return static_cast<int>(code);
}

inline const char* runtime_error(int code) {
  return cudaGetErrorString(static_cast<cudaError_t>(code));
}

}  // namespace penstock::fused
