#pragma once
// Gradients: adds the gradients of autograd to a unit's sum and moves them from copy to copy.
//
// Used only by the model's thread (by autograd's thread while a backward runs). The reduce lane
// makes the moves, at most one plan line at a time, which bounds the buffers in flight.
#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "src/exec/rank.h"

namespace penstock::exec {

// Collective over the ranks of `over`. Overwrites each rank's addends with the sums over these
// ranks.
void add_up(const Channels::Addends& over, device::Address addends, Dtype dtype, int64_t numel,
            const comm::Label& label);

class Gradients {
 public:
  Gradients(Rank& rank, Lanes& lanes) : rank_(rank), lanes_(lanes) {}

  // Waits for the last update's writes to disk, so that backward can use their memory. These writes
  // may overlap the forward. `number`: the number of the backward in its window.
  void begin_backward(int64_t number) {
    ++backward_;
    number_ = number;
    rank_.traffic.settle();
  }
  // Adds one parameter's gradient to the copy that each backward writes to. Returns false if the
  // gradient is not finite. On a device, take() always returns true, and the norm finds such a
  // gradient later.
  bool take(int unit, int flat, int slot, const at::Tensor& gradient);
  // Copies the unit's small gradients that take() has kept. Must be called before the end of the
  // backward.
  void pack(UnitState& unit);
  // Runs a gradient move. `late`: the move runs again, for gradients that came after its first run.
  // Units without a late gradient add zeros.
  void run(const PlannedStep& planned, bool late = false);
  // Runs a move of the update section: reads one chunk of the gradient from disk.
  void fetch(const PlannedStep& planned);
  // Runs a `sum` line: adds up partial flats over tensor ranks, or tied flats over stages.
  void sum(const PlannedStep& planned);
  // Undoes sum() if no update follows it, so that the next backward can add to the gradients.
  void reopen();
  void finish();  // blocks until every move is done
  // Returns the fence of the last submitted move. The lane is ordered, so this fence covers all
  // moves.
  const device::Fence& last_move() const { return done_; }
  // Discards the accumulated gradients.
  void discard();
  void clear(Flat& flat);  // frees the gradient after its update
  // Returns whether a gradient of the unit is still where its backward left it.
  bool late(int unit) const;
  // Returns whether the move takes gradients away from where a backward leaves them.
  bool takes_away(const std::vector<Move>& moves) const;
  // Replaces the accumulated gradient by `full` (fp32, the same on every rank) times `factor`.
  void set(int unit, int flat, int slot, const at::Tensor& full, double factor);
  // If `leaves` is set, each parameter that had a gradient before gets a gradient of zeros for
  // this window, as with zero_grad(set_to_none=False) in torch. Otherwise no parameter counts as
  // having had a gradient.
  void leave_zeros(bool leaves);
  // Removes the parameter's contributions to this window.
  void forget(Flat& flat, Slot& slot);
  // Returns the copy that holds the gradient now, or null.
  Copy* held(Flat& flat) const;
  // Completes each sum to which no later backward adds. Zeroes the elements without a contribution,
  // and creates a sum of zeros for parameters whose gradients are only zeros.
  void complete();
  // Returns the sum of squares of the part that only this rank counts. Each replica of a gradient
  // counts an equal piece, so every layout adds up the same pieces in the same order. A sum on a
  // device is not in the result: its square root is appended to `there` as a device scalar.
  double own_squares(Flat& flat, const Copy* copy, std::vector<at::Tensor>* there) const;
  // Must be called if a sum of squares on a device is not finite in fp32. Computes the sum of
  // own_squares() again in double. Blocks until the device is done. Returns infinity if the
  // gradient has left memory.
  double exact_squares(Flat& flat);

 private:
  struct Moved {  // in flight on the reduce lane
    Flat* flat = nullptr;
    Placement to;
    mem::Lease source;
    mem::DiskTicket arriving;  // the read into `source`
    mem::Lease residual;       // the old one, which the walk still reads
  };

  Copy& sum_of(Flat& flat);
  void add_up(Flat& flat, Buffer& sum, Axis axis, const comm::Label& label);
  void sum_late(Flat& flat, Buffer& sum, const comm::Label& label);
  void close(Flat& flat, Buffer& sum);
  void submit(const std::shared_ptr<Walk>& walk, const comm::Label& label);
  void widen(Copy& sum);
  Placement begin_of(const std::vector<Move>& moves) const;
  Copy& zeros_at(const Placement& place, Flat& flat);
  void put_back(Flat& flat, Copy& copy);
  void write(Flat& flat, Copy& copy, const Slot& slot, const at::Tensor& full, double factor);

  Rank& rank_;
  Lanes& lanes_;
  int64_t backward_ = 0;
  int64_t number_ = 0;  // of the backward in its window
  std::vector<Moved> moved_;
  // Freed in finish() with the sources, so that memory peaks do not vary.
  std::shared_ptr<Walk> walk_;
  device::Fence done_;
};

// Blocks until gradients that are on their way to host memory have arrived there.
void arrive_on_host(Rank& rank, const Gradients& gradients);

}  // namespace penstock::exec
