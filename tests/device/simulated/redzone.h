#pragma once
// Redzones: guard bytes before and after each block of device memory. Call these functions only on
// a stream, or while no stream uses the block.
#include <cstddef>
#include <string>

namespace penstock::sim {

constexpr size_t kRedzoneBytes = 512;  // keeps blocks aligned to 512 bytes, as on CUDA

// A block in the memory that kernels use. The user requested the first `asked` of its `size` bytes.
struct Extent {
  char* memory = nullptr;
  size_t size = 0;
  size_t asked = 0;
};

// Fills the redzones with a pattern that is NaN in every floating-point type of 16 bits and more.
void fence(const Extent& extent);

// Also fills the user's bytes with NaN.
void poison(const Extent& extent);

// Returns an error text if the redzones were overwritten, else "".
std::string violation(const Extent& extent);

}  // namespace penstock::sim
