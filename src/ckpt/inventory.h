#pragma once
// Inventory: every buffer of training state that this rank holds, and of which logical tensors its
// elements are: by the executor's own copies, so for any table, tier, tile and chunk. Saving and
// loading go through the same list.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "src/ckpt/manifest.h"
#include "src/exec/executor.h"

namespace penstock::ckpt {

// What a parameter of a flat is to the outside: a whole tensor, or (a tile) rows of one.
struct Global {
  std::string name;
  std::vector<int64_t> shape;
  int64_t begin = 0;  // element of the tensor
};
using GlobalOf = std::function<Global(int unit, const exec::Slot& slot)>;

// One buffer between steps. The pointers are good until the executor does anything.
struct Holding {
  int unit = 0;
  exec::Flat* flat = nullptr;
  exec::Buffer* buffer = nullptr;
  mem::Account account{};
  Placement place;     // of the copy it is (a part) of
  std::string role;    // "param": fp32 masters, or parameters that do not train
  int64_t first = 0;   // element of the flat
  bool users = false;  // may change it at any time: it is what they see as the parameter
  // Low-precision parameters that users may have written to since the last step, for the masters
  // that this is; null where there are none.
  const exec::Buffer* edits = nullptr;
  int64_t edits_first = 0;  // element of the flat that `edits` begins with

  int64_t numel() const { return buffer->numel; }
};

// `moments`: what the optimizer calls the values that it keeps beside the masters. `lent`: the
// masters are an optimizer's of the user's own.
std::vector<Holding> holdings(exec::Executor& executor, int rank,
                              const std::vector<std::string>& moments, bool lent = false);

// Which part of a holding this rank writes: [first, second) in elements of it. Ranks that hold the
// same share the work, at blocks.
std::pair<int64_t, int64_t> share_of(const Holding& holding, const Mesh& mesh, int rank);

// Elements [begin, begin + numel) of one parameter's tensor, at an element of the flat.
struct StatePiece {
  Global global;
  int64_t numel = 0;
  int64_t at = 0;
};
// Of the flat's elements [first, first + numel). Parameters without elements are there, too.
std::vector<StatePiece> pieces(const Holding& holding, int64_t first, int64_t numel,
                               const GlobalOf& global_of);

// As safetensors names it. Throws ConfigError for a type that it has not.
const char* file_dtype(Dtype dtype);
const char* file_dtype(at::ScalarType type);
// The other way. Throws Damaged for a type that torch has not.
at::ScalarType scalar_type(const std::string& file_dtype);

}  // namespace penstock::ckpt
