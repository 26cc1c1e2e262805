#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <unordered_map>

namespace penstock::engine {

// [Note: Outside reads] A model may read a parameter outside the module that owns it. In the first
// forward, the engine checks the arguments of every op. It uses a fallback on a dispatch key that
// torch itself does not use (about 0.1 us per op). If an op is about to read a freed parameter, the
// engine gathers the parameter's unit first. From then on, the unit is kept whole for entire
// passes. Later passes run without the fallback, so reading a freed parameter raises an error
// (Slot::guard).
class OutsideReads {
 public:
  // `unit_of_storage`: the unit of each parameter, by the parameter's storage. `found` gathers the
  // unit of a freed parameter.
  OutsideReads(std::unordered_map<const c10::StorageImpl*, int> unit_of_storage,
               std::function<void(int)> found);
  ~OutsideReads();
  OutsideReads(const OutsideReads&) = delete;
  OutsideReads& operator=(const OutsideReads&) = delete;

  // Called for each tensor argument of each op of the current thread.
  void look_at(const at::Tensor& tensor) const;

 private:
  std::unordered_map<const c10::StorageImpl*, int> unit_of_storage_;
  std::function<void(int)> found_;
  OutsideReads* outer_;
};

}  // namespace penstock::engine
