#pragma once
// WholeParams: inside gathered(), replaces cut parameters and parameters of other stages by full
// tensors with their own memory. Used only by the model's thread. Every rank makes the same calls,
// except hide().
#include <cstdint>
#include <map>
#include <string>

#include "src/exec/executor.h"

namespace penstock::engine {

class WholeParams {
 public:
  explicit WholeParams(exec::Executor& executor) : executor_(executor) {}

  // [all ranks] Points the unit's parameters to full tensors. Parameters of this stage must be
  // gathered.
  void show(int unit);
  // [all ranks] Writes rank 0's values into each rank's part, in the copy that forward and backward
  // use.
  void write(int unit);
  // Returns the first shown parameter whose values differ from this rank's part, or "".
  std::string edited(int unit);
  // Points the parameters to this rank's parts again.
  void hide(int unit);
  // Returns whether any rank may show a parameter. The answer is the same on every rank.
  bool used() const;
  bool shows() const { return !shown_.empty(); }  // whether any parameter is a full tensor now

 private:
  template <class Action>
  void for_each(int unit, const Action& action);
  void show(exec::Slot& slot, const at::Tensor& whole);
  const exec::Buffer& computing(const exec::Flat& flat) const;
  at::Tensor part(const exec::Flat& flat, const exec::Slot& slot) const;

  exec::Executor& executor_;
  // `hash`: hash of the gathered values. A rank without a part of the parameter compares hashes to
  // find edits.
  struct Shown {
    at::Tensor whole;
    uint64_t hash = 0;
  };
  std::map<const exec::Slot*, Shown> shown_;
};

}  // namespace penstock::engine
