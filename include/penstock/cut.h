#pragma once
// Cut: what a rank of the tensor axis has of a parameter. A pure value; any thread.
#include <cstdint>
#include <utility>
#include <vector>

#include "penstock/export.h"

namespace penstock {

// All of it, with gradients that are equal by themselves; a part of it each; or all of it, where
// each has an addend of its gradient (a norm before a column split, say; Megatron-LM,
// arXiv:2205.05198, section 4.2.2).
enum class TensorCut : uint8_t { kWhole, kCut, kPartial };

struct PENSTOCK_API Cut {
  TensorCut kind = TensorCut::kWhole;
  int64_t dim = 0;             // along which it is cut
  std::vector<int64_t> parts;  // sizes along it of what is cut by itself: [Q|K|V] has three

  // What rank `index` of `count` has along `dim`, first and past the last, in order: of each part
  // its share(). None unless it is cut.
  std::vector<std::pair<int64_t, int64_t>> ranges(int index, int count) const;
  int64_t size(int index, int count) const;  // of these together
  bool operator==(const Cut&) const = default;
};

// Of `size` elements those of rank `index` of `count`, first and past the last: neighbours, the
// first ranks with one more where they do not divide evenly.
PENSTOCK_API std::pair<int64_t, int64_t> share(int64_t size, int index, int count);

}  // namespace penstock
