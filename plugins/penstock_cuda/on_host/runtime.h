#pragma once
// Kernels on the host, for tests (see on_cuda/runtime.h): the calling thread runs all threads of
// all blocks, one after the other.

#define PENSTOCK_FUSED_CODE inline

namespace penstock::fused {

template <class Kernel, class Args>
int launch(const Args& args, int num_blocks, void* /*stream*/) {
  for (int block = 0; block < num_blocks; ++block) {
    for (int thread = 0; thread < Kernel::kThreads; ++thread) {
      Kernel::run_block(args, block, thread);
    }
  }
  return 0;
}

template <class Kernel, class Args>
int check() {
  return 0;
}

inline const char* runtime_error(int /*code*/) { return "unknown error"; }

}  // namespace penstock::fused
