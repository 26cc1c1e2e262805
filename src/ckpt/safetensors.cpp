#include "src/ckpt/safetensors.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <utility>
#include <nlohmann/json.hpp>

#include "src/base/text.h"
#include "src/ckpt/damaged.h"
#include "src/ckpt/json.h"

namespace penstock::ckpt {

namespace {

constexpr int64_t kLengthBytes = 8;
constexpr int64_t kMaxHeadBytes = 1LL << 30;  // a larger header is treated as damage

constexpr std::array<std::pair<std::string_view, int64_t>, 14> kDtypes = {{{"F64", 8},
                                                                           {"F32", 4},
                                                                           {"F16", 2},
                                                                           {"BF16", 2},
                                                                           {"I64", 8},
                                                                           {"I32", 4},
                                                                           {"I16", 2},
                                                                           {"I8", 1},
                                                                           {"U64", 8},
                                                                           {"U32", 4},
                                                                           {"U16", 2},
                                                                           {"U8", 1},
                                                                           {"BOOL", 1},
                                                                           {"C64", 8}}};

TensorHead parse_tensor(const std::string& name, const Json& value, int64_t data_bytes) {
  const JsonReader entry(value, "the safetensors header's entry of \"" + name + "\"");
  TensorHead tensor;
  tensor.name = name;
  tensor.dtype = entry.text("dtype");
  for (const Json& size : entry.list("shape")) {
    tensor.shape.push_back(entry.number(size, 0, std::numeric_limits<int64_t>::max()));
  }
  const Json& offsets = entry.list("data_offsets");
  if (offsets.size() != 2) entry.fail("data_offsets are not two numbers");
  tensor.begin = entry.number(offsets[0], 0, data_bytes);
  tensor.end = entry.number(offsets[1], tensor.begin, data_bytes);
  const int64_t size = value_bytes(tensor.dtype), numel = num_elements(tensor.shape);
  if (size == 0) entry.fail("unknown dtype " + tensor.dtype);
  // The second condition keeps the product from overflowing.
  if (numel < 0 || numel > data_bytes || numel * size != tensor.end - tensor.begin) {
    entry.fail("shape and dtype do not match the number of bytes");
  }
  return tensor;
}

}  // namespace

int64_t value_bytes(std::string_view dtype) {
  for (const auto& [name, bytes] : kDtypes) {
    if (name == dtype) return bytes;
  }
  return 0;
}

int64_t num_elements(const std::vector<int64_t>& shape) {
  int64_t numel = 1;
  for (const int64_t size : shape) {
    if (size < 0 || __builtin_mul_overflow(numel, size, &numel)) return -1;
  }
  return numel;
}

std::string write_head(const std::vector<TensorHead>& tensors, int64_t align) {
  Json json = Json::object();
  for (const TensorHead& tensor : tensors) {
    json[tensor.name] = {{"dtype", tensor.dtype},
                         {"shape", tensor.shape},
                         {"data_offsets", {tensor.begin, tensor.end}}};
  }
  std::string text = dump(json);
  const auto used = kLengthBytes + static_cast<int64_t>(text.size());
  text.append(static_cast<size_t>((used + align - 1) / align * align - used), ' ');
  // The length is little-endian and does not count itself.
  const uint64_t length = text.size();
  std::string head(kLengthBytes, '\0');
  for (size_t i = 0; i < head.size(); ++i) head[i] = static_cast<char>(length >> (8 * i));
  return head + text;
}

int64_t head_bytes(std::string_view first, int64_t file_bytes) {
  if (static_cast<int64_t>(first.size()) < kLengthBytes) {
    throw Damaged("[ckpt::safetensors] the file ends before its header");
  }
  uint64_t length = 0;
  for (size_t i = kLengthBytes; i > 0; --i) {
    length = length << 8 | static_cast<unsigned char>(first[i - 1]);
  }
  const int64_t most = std::min(kMaxHeadBytes, file_bytes - kLengthBytes);
  if (most < 0 || length > static_cast<uint64_t>(most)) {
    throw Damaged(concat("[ckpt::safetensors] a header of ", length,
                         " bytes does not fit into a file of ", file_bytes, " bytes"));
  }
  return kLengthBytes + static_cast<int64_t>(length);
}

std::vector<TensorHead> parse_head(std::string_view head, int64_t file_bytes) {
  const int64_t bytes = head_bytes(head, file_bytes);
  if (static_cast<int64_t>(head.size()) != bytes) {
    throw Damaged("[ckpt::safetensors] the file ends inside its header");
  }
  const Json json = parse_json(head.substr(kLengthBytes), "the safetensors header");
  if (!json.is_object()) throw Damaged("[ckpt::safetensors] the header is not a JSON object");
  std::vector<TensorHead> tensors;
  for (const auto& [name, value] : json.items()) {
    if (name != "__metadata__") tensors.push_back(parse_tensor(name, value, file_bytes - bytes));
  }
  std::sort(tensors.begin(), tensors.end(), [](const TensorHead& a, const TensorHead& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  // The format requires that tensors leave no bytes unused.
  int64_t end = 0;
  for (const TensorHead& tensor : tensors) {
    if (tensor.begin != end) {
      throw Damaged(concat("[ckpt::safetensors] tensor \"", tensor.name,
                           "\" does not begin where the previous tensor ends"));
    }
    end = tensor.end;
  }
  if (end != file_bytes - bytes) {
    throw Damaged("[ckpt::safetensors] the tensors do not end where the file ends");
  }
  return tensors;
}

}  // namespace penstock::ckpt
