#pragma once
// Units that stay whole on every rank between forwards, for inference.
//
// [Note: Inference] Inference is a table whose plan has no backward. A training engine has two ways
// to run it. In the first, units are held: they are gathered once, and forwards then move nothing,
// so ranks may run different numbers of forwards. In the second, each forward moves its units as
// the table says. Training continues from the state at rest, which neither way changes.
#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <vector>

#include "penstock/config.h"
#include "penstock/core.h"

namespace penstock {

class Values;

namespace exec {
class Executor;
class Params;
}  // namespace exec

namespace engine {

// Freezes the parameters of an engine for inference, until it is destroyed.
class FrozenParams {
 public:
  FrozenParams(const ModelTree& tree, const Config& config);
  // Sets requires_grad as it was before, for a forward without gradients, or to false. at::matmul
  // copies a weight without requires_grad once per row of a batch if the other operand is a
  // 3-dimensional view, such as the last hidden states of a prompt.
  void set_requires_grad(bool as_before);
  FrozenParams(const FrozenParams&) = delete;
  FrozenParams& operator=(const FrozenParams&) = delete;
  ~FrozenParams();

 private:
  std::vector<at::Tensor> trained_;  // before
};

// Throws RuntimeFault if a pass over the weights is open. `call` is about to change the weights.
void refuse_in_pass(int passes, const char* call);

// [all ranks] Claims space in the swap file for parameters of the units that rest in users' files
// and will be written. Throws RuntimeFault on all ranks if a disk is too full.
void claim_writes(exec::Executor& executor, const std::vector<int>& units);

// Units that are made whole for a context.
class BroughtUnits {
 public:
  // `in_section`: a forward or backward is open.
  BroughtUnits(exec::Params& params, bool in_section) : params_(params), in_section_(in_section) {}

  // Returns whether the open section computes with rounded values of the unit. The unit then keeps
  // these values.
  bool keeps_rounded(int unit) const;
  // [all ranks] Makes the unit whole. Throws RuntimeFault.
  void bring(int unit);
  // Frees the units that bring() made whole, for example if memory ran out.
  void undo();

 private:
  exec::Params& params_;
  const bool in_section_;
  std::vector<int> brought_{};
};

}  // namespace engine

// [all ranks] Gathers the units, and keeps them whole until let_go_of_held(). Returns false, and
// gathers nothing, if the copies would take more than 4/5 of the memory that is left on some rank.
PENSTOCK_API bool hold(Values& values, const std::vector<int>& units);
// [all ranks] Frees the copies. `error`: what this rank's code raised while units were held, or "".
// Throws RuntimeFault on all ranks if the code of a rank raised an error, or if parameters that do
// not rest whole were changed in the meantime.
PENSTOCK_API void let_go_of_held(Values& values, const std::vector<int>& units,
                                 const std::string& error);
// Replaces let_go_of_held() on a rank that must not wait for the others, because its code raised an
// error while they may wait for this rank. Their calls that meet this rank throw.
PENSTOCK_API void abandon_held(Values& values, const std::vector<int>& units,
                               const std::string& error);

// A pass over the weights that users read value by value. Until it ends, calls that change the
// weights throw RuntimeFault.
PENSTOCK_API void begin_pass(Values& values);
PENSTOCK_API void end_pass(Values& values);

// Returns the first unit of each parameter, by name.
PENSTOCK_API std::map<std::string, int> first_units(const Values& values);

}  // namespace penstock
