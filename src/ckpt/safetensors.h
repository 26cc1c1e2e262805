#pragma once
// The head of a safetensors file: eight bytes of length, then JSON that says where each tensor is.
// (https://github.com/huggingface/safetensors#format) Pure values; any thread.
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace penstock::ckpt {

// Bytes of a value of this type ("F32", "BF16", "U8", ...), or 0 where there is no such type.
int64_t value_bytes(std::string_view dtype);

// The product of the sizes, or -1 where one is negative or there are more than fit.
int64_t num_elements(const std::vector<int64_t>& shape);

struct TensorHead {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  int64_t begin = 0, end = 0;  // bytes, from the end of the head
};

// The whole head, length included, padded with blanks to a multiple of `align`. Throws ConfigError
// for a name that is no UTF-8.
std::string write_head(const std::vector<TensorHead>& tensors, int64_t align);
// Its size, by the first eight bytes of a file of so many bytes. Throws Damaged.
int64_t head_bytes(std::string_view first, int64_t file_bytes);
// Throws Damaged for anything but a head whose tensors fill the rest of the file without gaps.
std::vector<TensorHead> parse_head(std::string_view head, int64_t file_bytes);

}  // namespace penstock::ckpt
