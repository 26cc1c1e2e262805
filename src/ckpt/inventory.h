#pragma once
// Inventory: lists every buffer of training state that this rank holds, and the logical tensors to
// which the buffers' elements belong. The list is made from the executor's own copies, so it works
// for any table, tier, tile and chunk. Saving and loading use the same list.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "src/ckpt/manifest.h"
#include "src/exec/executor.h"

namespace penstock::ckpt {

// The logical tensor to which a flat's parameter belongs. The parameter is the whole tensor or, for
// a tile, some of the tensor's rows.
struct Global {
  std::string name;
  std::vector<int64_t> shape;
  int64_t begin = 0;  // index of the parameter's first element in the tensor
};
using GlobalOf = std::function<Global(int unit, const exec::Slot& slot)>;

// One buffer of training state, as it is between steps. The pointers are valid until the executor
// runs again.
struct Holding {
  int unit = 0;
  exec::Flat* flat = nullptr;
  exec::Buffer* buffer = nullptr;
  mem::Account account{};
  Placement place;     // placement of the copy that the buffer belongs to
  std::string role;    // "param": fp32 masters, or parameters that do not train
  int64_t first = 0;   // index of the buffer's first element in the flat
  bool users = false;  // users see this buffer as a parameter, and may change it at any time
  // For masters: the low-precision parameters, which users may have written to since the last step.
  // Null if there are no such parameters. Also null with deltas; callers must then apply the edits
  // to the masters before they read the masters ([Note: Deltas]).
  const exec::Buffer* edits = nullptr;
  int64_t edits_first = 0;  // index in the flat of the first element of `edits`

  int64_t numel() const { return buffer->numel; }
};

// `moments`: the names of the optimizer's moments, in order. `lent`: a user-supplied optimizer
// updates the masters.
std::vector<Holding> holdings(exec::Executor& executor, int rank,
                              const std::vector<std::string>& moments, bool lent = false);

// Returns the range [first, second) of a holding's elements that this rank writes. If several ranks
// hold the same values, each writes some of them, in whole blocks.
std::pair<int64_t, int64_t> share_of(const Holding& holding, const Mesh& mesh, int rank);

// Elements [global.begin, global.begin + numel) of a tensor. The first of these elements is element
// `at` of the flat.
struct StatePiece {
  Global global;
  int64_t numel = 0;
  int64_t at = 0;
};
// Returns the pieces of the flat's elements [first, first + numel), including parameters without
// elements.
std::vector<StatePiece> pieces(const Holding& holding, int64_t first, int64_t numel,
                               const GlobalOf& global_of);

// Returns the safetensors name of the dtype. Throws ConfigError if safetensors has no such dtype.
const char* file_dtype(Dtype dtype);
const char* file_dtype(at::ScalarType type);
// The inverse of file_dtype(). Throws Damaged if torch has no such dtype.
at::ScalarType scalar_type(const std::string& file_dtype);

}  // namespace penstock::ckpt
