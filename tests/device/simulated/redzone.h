#pragma once
// Redzones: what lies before and behind each block of device memory. Only on a stream, or while no
// stream uses the block.
#include <cstddef>
#include <string>

namespace penstock::sim {

constexpr size_t kRedzoneBytes = 512;  // keeps blocks aligned to 512 bytes, as CUDA's are

// A block in the memory the kernels use: `asked` of its `size` bytes are its user's.
struct Extent {
  char* memory = nullptr;
  size_t size = 0;
  size_t asked = 0;
};

// Fills the redzones with a pattern that is NaN in every floating-point type of 16 bits and more.
void fence(const Extent& extent);

// Fills what the user may write with NaN too.
void poison(const Extent& extent);

// What is wrong with the redzones, or nothing.
std::string violation(const Extent& extent);

}  // namespace penstock::sim
