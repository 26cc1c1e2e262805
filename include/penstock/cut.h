#pragma once
// Cut: which part of a parameter one rank of an axis has. A plain value, usable from any thread.
#include <cstdint>
#include <utility>
#include <vector>

#include "penstock/axis.h"
#include "penstock/export.h"

namespace penstock {

// kWhole: every rank has the whole parameter, and the gradients of all ranks are equal. kCut: each
// rank has a part. kPartial: every rank has the whole parameter, and its gradient is the sum of all
// ranks' gradients (for example, the weight of a norm before a column split; Megatron-LM,
// arXiv:2205.05198, section 4.2.2).
enum class TensorCut : uint8_t { kWhole, kCut, kPartial };

struct PENSTOCK_API Cut {
  TensorCut kind = TensorCut::kWhole;
  int64_t dim = 0;  // the dim that is cut
  std::vector<int64_t>
      parts;  // sizes along `dim` of the parts that are cut separately: [Q|K|V] has three
  Axis axis = Axis::kTensor;  // the axis whose ranks have the parts

  // Returns the ranges [begin, end) along `dim` that rank `index` of `count` has: its share() of
  // each part, in order. Empty unless kind is kCut.
  std::vector<std::pair<int64_t, int64_t>> ranges(int index, int count) const;
  int64_t size(int index, int count) const;  // total size of these ranges
  bool operator==(const Cut&) const = default;
};

// Returns the range [begin, end) of `size` elements that rank `index` of `count` has. The ranges
// are contiguous in rank order; if `size` is not divisible by `count`, the first ranks have one
// element more.
PENSTOCK_API std::pair<int64_t, int64_t> share(int64_t size, int index, int count);

}  // namespace penstock
