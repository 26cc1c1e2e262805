#pragma once
// WholeParams: inside gathered(), parameters that tensor ranks have cut and those of other stages
// are all there, in tensors of their own. Compute thread only; every rank makes the same calls, but
// for hide().
#include <cstdint>
#include <map>
#include <string>

#include "src/exec/executor.h"

namespace penstock::engine {

class WholeParams {
 public:
  explicit WholeParams(exec::Executor& executor) : executor_(executor) {}

  // The unit's parameters, of those that are here, are where they compute.
  void show(int unit);
  // Rank 0's values become every rank's parts, where they compute.
  void write(int unit);
  // The first of the unit's that has other values than this rank's part.
  std::string edited(int unit);
  // The parameters are this rank's parts again.
  void hide(int unit);
  // Whether any rank may show something. On every rank alike: what one shows another may have.
  bool used() const;

 private:
  template <class Action>
  void for_each(int unit, const Action& action);
  void show(exec::Slot& slot, const at::Tensor& whole);
  const exec::Buffer& computing(const exec::Flat& flat) const;
  at::Tensor part(const exec::Flat& flat, const exec::Slot& slot) const;

  exec::Executor& executor_;
  // With a hash of what was gathered, where nothing here says whether it was edited.
  struct Shown {
    at::Tensor whole;
    uint64_t hash = 0;
  };
  std::map<const exec::Slot*, Shown> shown_;
};

}  // namespace penstock::engine
