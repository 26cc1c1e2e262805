#pragma once
// The header of a safetensors file: eight bytes with the length of the JSON, then the JSON, which
// has the place of each tensor (https://github.com/huggingface/safetensors#format). Plain values;
// usable from any thread.
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace penstock::ckpt {

// Returns the size in bytes of one value of this dtype ("F32", "BF16", "U8", ...), or 0 if the
// dtype is unknown.
int64_t value_bytes(std::string_view dtype);

// Returns the product of the sizes, or -1 if a size is negative or the product overflows.
int64_t num_elements(const std::vector<int64_t>& shape);

struct TensorHead {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  int64_t begin = 0, end = 0;  // byte range, counted from the end of the header
};

// Returns the header: the length, then the JSON with spaces that pad the header to a multiple of
// `align`. Throws ConfigError for a name that is not UTF-8.
std::string write_head(const std::vector<TensorHead>& tensors, int64_t align);
// Returns the header's size. `first`: the first eight bytes of a file that has `file_bytes` bytes.
// Throws Damaged if the size is impossible.
int64_t head_bytes(std::string_view first, int64_t file_bytes);
// Throws Damaged unless the tensors of the header fill the file after the header without gaps.
std::vector<TensorHead> parse_head(std::string_view head, int64_t file_bytes);

}  // namespace penstock::ckpt
