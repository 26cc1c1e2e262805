#pragma once
// Wholes: inside gathered(), parameters that tensor ranks have cut are all there, in tensors of
// their own. Compute thread only; every rank makes the same calls, but for hide().
#include <map>
#include <string>

#include "src/exec/executor.h"

namespace penstock::engine {

class Wholes {
 public:
  explicit Wholes(exec::Executor& executor) : executor_(executor) {}

  // The unit's parameters are where they compute.
  void show(int unit);
  // Rank 0's values become every rank's parts, where they compute.
  void write(int unit);
  // The first of the unit's that has other values than this rank's part.
  std::string edited(int unit);
  // The parameters are this rank's parts again.
  void hide(int unit);
  bool any() const { return !shown_.empty(); }

 private:
  template <class Action>
  void for_each(int unit, const Action& action);
  at::Tensor part(const exec::Flat& flat, const exec::Slot& slot) const;

  exec::Executor& executor_;
  std::map<const exec::Slot*, at::Tensor> shown_;
};

}  // namespace penstock::engine
