#pragma once
// Gradients: taken from autograd into a unit's sum, and moved from copy to copy.
//
// Compute thread only (autograd's while a backward runs). The reduce lane makes the moves; what it
// has not finished yet is bounded.
#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "src/exec/rank.h"

namespace penstock::exec {

// The ranks' addends become their sum, in place. [those ranks]
void add_up(comm::Channel& channel, const Members& ranks, device::Address addends, Dtype dtype,
            int64_t numel, const comm::Label& label);

class Gradients {
 public:
  Gradients(Rank& rank, Lanes& lanes) : rank_(rank), lanes_(lanes) {}

  void begin_backward() { ++backward_; }
  // Adds one parameter's gradient to the copy that a backward leaves. False when it is not finite.
  bool take(int unit, int flat, int slot, const at::Tensor& gradient);
  // A move. A late one is made again for some of its units; the others have nothing to add.
  void run(const PlannedStep& planned, bool late = false);
  // As a move of the update section: the gradient comes from disk, a chunk at a time.
  void fetch(const PlannedStep& planned);
  // Partial flats, over the tensor axis; those of several stages, over the pipeline.
  void sum(const PlannedStep& planned);
  // After sum(), where the update did not come: backwards may add to them again.
  void reopen();
  void finish();  // every move is done
  // Of the last move that was given to the lane, which works in order.
  const device::Fence& last_move() const { return done_; }
  // Throws away what was accumulated.
  void discard();
  void clear(Flat& flat);  // after its update
  // A late gradient is where its backward left it.
  bool late(int unit) const;
  // Replaces what was accumulated by `full` (fp32, the same on every rank) times `factor`.
  void set(int unit, int flat, int slot, const at::Tensor& full, double factor);
  // Nothing came for this parameter in this window.
  void forget(Flat& flat, Slot& slot);
  // The copy that holds the gradient now; null where there is none.
  Copy* held(Flat& flat) const;
  // Sums that no backward will add to become whole.
  void complete();
  // Over the part that only this rank counts: each replica of a gradient takes an equal piece, so
  // every layout adds up the same pieces in the same order. What a device has is not in it: that
  // sum is appended to `there`, as a scalar on the device.
  double own_squares(Flat& flat, const Copy* copy, std::vector<at::Tensor>* there) const;

 private:
  struct Moved {  // in flight on the reduce lane
    Flat* flat = nullptr;
    Placement to;
    mem::Lease source;
    mem::DiskTicket arriving;  // the read into it
  };

  Copy& sum_of(Flat& flat);
  void add_up(Flat& flat, Buffer& sum, bool across, const comm::Label& label);
  void close(Flat& flat, Buffer& sum);
  void widen(Copy& sum);
  Placement begin_of(const std::vector<Move>& moves) const;
  Copy& zeros_at(const Placement& place, Flat& flat);
  void put_back(Flat& flat, Copy& copy);
  void write(Flat& flat, Copy& copy, const Slot& slot, const at::Tensor& full, double factor);

  Rank& rank_;
  Lanes& lanes_;
  int64_t backward_ = 0;
  std::vector<Moved> moved_;
  std::shared_ptr<Walk> walk_;  // its buffers go when the others do, so that peaks do not vary
  device::Fence done_;
};

}  // namespace penstock::exec
