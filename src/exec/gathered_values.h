#pragma once
// GatheredValues: whole values of parameters and gradients, in and out of wherever their copies
// are. Collective, outside the plan; every rank calls them in the same order. Compute thread only.
#include <ATen/core/Tensor.h>

#include <string>

#include "src/exec/updates.h"

namespace penstock::exec {

class GatheredValues {
 public:
  GatheredValues(Rank& rank, Gradients& gradients, Updates& updates)
      : rank_(rank), gradients_(gradients), updates_(updates) {}

  // The masters where it trains. They arrive on every rank, or on rank 0, in `room`, which takes
  // numel elements of fp32 there and elsewhere this rank's part. Returns what arrives' dtype. Here
  // and below values that go in and out are in host memory.
  Dtype parameters(int unit, int flat, char* room, bool everywhere);
  at::Tensor resting(int unit, int flat);   // fp32, of the parameters as they rest
  void renew() { rank_.channels.renew(); }  // after the group's
  at::Tensor gradient(int unit, int flat);  // fp32, as accumulated
  // Of a parameter that tensor ranks have cut: all of it, made of every rank's part, in the part's
  // dtype; and this rank's part of it, a copy. Else the values as they are. [its tensor ranks]
  at::Tensor whole_of(const Slot& slot, const at::Tensor& part);
  // The flat's values (fp32) of the first stage that has it, on all ranks of the pipeline, where it
  // is not on all of them anyway. `own`: this stage's; undefined where it has none. [its pipeline]
  at::Tensor across_stages(const Flat& flat, const at::Tensor& own, const std::string& label);
  // The same on rank 0 alone, of its tensor ranks' parts; undefined elsewhere. [all ranks]
  at::Tensor whole_on_first(const Slot& slot, const at::Tensor& part);
  at::Tensor part_of(const Slot& slot, const at::Tensor& whole) const;
  // `full` (fp32, equal on all ranks) becomes the resting copy and the optimizer's first state.
  void adopt(Flat& flat, const at::Tensor& full, const std::string& label);
  // This rank's part of new fp32 masters, as `place` cuts them, becomes the optimizer's and, cast
  // and gathered, the resting parameters. [all ranks]
  void restore(int unit, Flat& flat, const Placement& place, char* masters);
  // Resting parameters were written: who looks at them sees them.
  void show(Flat& flat);
  // After rank 0's whole parameters were edited: every copy follows.
  void refresh(int unit);
  // The first parameter of which this rank's part rests with other values than were gathered:
  // users wrote to it. Empty where there is none. Not collective. On a device that is not known
  // before the norm, which then ends the step.
  std::string edited(int unit);
  // What edited() has left open, known now: the host waits for the device.
  std::string resolve_doubts();
  // Values of the elements from `first`, in the flat's dtype and equal on every rank, go to every
  // copy that rests but for one that computes. Not collective.
  void write(Flat& flat, int64_t first, int64_t numel, device::Address values);

 private:
  at::Tensor on_host(const Buffer& buffer) const;
  at::Tensor whole(Placement place, const void* own, const Flat& flat, const std::string& label);
  at::Tensor read(Buffer& own, Placement place, mem::Account account, const Flat& flat,
                  const std::string& label);
  void own_masters(Flat& flat, char* to);
  void gather(const Placement& place, const char* own, const Flat& flat, const std::string& label,
              char* full);
  void set_rest(Flat& flat, const Placement& from, char* values, const std::string& label);
  void doubt(const Flat& flat, Buffer& own, device::Address seen);
  at::Tensor open_sum(const Flat& flat, const Copy* sum, const std::string& label);

  Rank& rank_;
  Gradients& gradients_;
  Updates& updates_;
};

}  // namespace penstock::exec
