#pragma once
// GatheredValues: reads and writes full tensors of parameters and gradients, wherever their copies
// are. Most methods are collectives outside the plan, and every rank must call them in the same
// order. Used only by the model's thread. The values that callers pass and receive are in host
// memory. [stage], [pipeline] and [tensor ranks] mark collectives of the ranks of this stage,
// pipeline or tensor group.
#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

#include "src/exec/residuals.h"
#include "src/exec/updates.h"

namespace penstock::exec {

class GatheredValues {
 public:
  // The objects must outlive this one. No method may be called before all of them exist.
  GatheredValues(Rank& rank, Lanes& lanes, Gradients& gradients, Updates& updates)
      : rank_(rank), lanes_(lanes), gradients_(gradients), updates_(updates) {}

  // [stage] Gathers the flat's masters (or the resting parameters of a frozen flat) into `room`, on
  // every rank or on the first data rank of the flat. On these ranks, `room` must have space for
  // numel fp32 elements. On other ranks, it must have space for the rank's part. Returns the dtype
  // of the gathered values.
  Dtype parameters(int unit, int flat, char* room, bool everywhere);
  at::Tensor resting(int unit, int flat);  // [stage] the resting parameters, in fp32
  // Must follow Group::renew(). From then on, values travel through host memory only, because the
  // connections of the devices may have been aborted.
  void renew() {
    rank_.channels.renew();
    devices_fail_ = true;
  }
  at::Tensor gradient(int unit, int flat);  // [stage] the accumulated gradient, in fp32
  // [tensor ranks] Returns the full tensor of a cut parameter, joined from every rank's part, with
  // the dtype and the device of `part`. Returns `part` if the parameter is not cut.
  at::Tensor whole_of(const Slot& slot, const at::Tensor& part);
  // [pipeline] Sends the flat's values (fp32) from the first stage that has it to the other stages.
  // `own`: this stage's values, or an undefined tensor. Defined values are returned unchanged. Does
  // nothing if all stages have the flat.
  at::Tensor across_stages(const Flat& flat, const at::Tensor& own, const std::string& label);
  Residuals residuals() { return Residuals(rank_); }
  // [stage] Like whole_of(), but only the first rank of the stage gets the full tensor. Other ranks
  // get an undefined tensor.
  at::Tensor whole_on_first(const Slot& slot, const at::Tensor& part);
  // Returns a copy of this rank's part of a cut parameter, or `whole` itself if the parameter is
  // not cut.
  at::Tensor part_of(const Slot& slot, const at::Tensor& whole) const;
  // Returns the ranges of the flat's elements for which this rank keeps parameters or masters.
  std::vector<std::pair<int64_t, int64_t>> kept(const Flat& flat) const;
  // [stage] Stores `full` as resting parameters and masters, and zeroes the moments. `full` is
  // fp32. It must have rank 0's values wherever this rank keeps elements.
  void adopt(Flat& flat, const at::Tensor& full, const std::string& label);
  // [stage] Stores this rank's part of new fp32 masters, cut as in `place`, and writes the resting
  // parameters from them (cast and gathered).
  void restore(int unit, Flat& flat, const Placement& place, char* masters);
  // Copies user edits of the unit's parameters to its masters, as the next update would.
  void take_edits(int unit);
  // [stage] Writes the unit's resting parameters from its masters, which were changed outside an
  // update.
  void publish(int unit);
  // Sets the windows again after the resting parameters were written.
  void show(Flat& flat);
  // [stage] Copies the first rank's edited full parameters to every copy on every rank. The values
  // of quantized parameters are then those at rest, rounded, in every copy.
  void refresh(int unit);
  // [stage] `values` [flat.numel]: fp32 values of the first rank; NaN means no value. Sets a master
  // to its value if the value rounds to the parameter (with deltas: to the parameter at rest).
  void refine(Flat& flat, const at::Tensor& values, const std::string& label);
  // Returns the first parameter that users wrote to: its gathered values differ from this rank's
  // resting shard. Returns "" if there is none. Not collective. For a device, the call does not
  // read the result: it adds the result to Rank::doubts, and the norm throws the error.
  std::string edited(int unit);
  // Reads Rank::doubts, which blocks until the device is done. Returns the first edited parameter.
  std::string resolve_doubts();
  // Writes `values` to the resting copies, beginning at element `first`. The values must have the
  // flat's dtype and be equal on every rank. Skips a resting copy that forward and backward also
  // use. Not collective.
  void write(Flat& flat, int64_t first, int64_t numel, device::Address values);

 private:
  at::Tensor on_host(const Buffer& buffer, Dtype decoded = Dtype::kFp32) const;
  at::Tensor whole(Placement place, const void* own, const Flat& flat, const std::string& label);
  at::Tensor read(Buffer& own, Placement place, mem::Account account, const Flat& flat,
                  const std::string& label);
  void own_masters(Flat& flat, char* to);
  void gather(const Placement& place, const char* own, const Flat& flat, const std::string& label,
              char* full);
  // Returns whether values with this placement are gathered as [Note: Values between nodes] says.
  bool through_devices(const Placement& place) const;
  void show_rounded(Flat& flat, Buffer& whole, const std::string& label);
  void set_rest(Flat& flat, const Placement& from, char* values, const std::string& label);
  void doubt(const UnitState& unit, const Flat& flat, Buffer& own, device::Address seen);
  at::Tensor open_sum(const Flat& flat, const Copy* sum, const std::string& label);

  Rank& rank_;
  Lanes& lanes_;
  Gradients& gradients_;
  Updates& updates_;
  bool devices_fail_ = false;
};

}  // namespace penstock::exec
