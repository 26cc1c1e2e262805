#pragma once
// Residuals: the rounding errors of gradient sums over a lossy wire, kept for the next sum.
//
// [Note: Residuals] Each rank keeps the rounding errors of its own addends, so a residual is a
// partial sum with the layout of the addends: only its sum over the ranks has a meaning. A sum adds
// the residual to the addends before it encodes them and keeps the errors of this encoding:
//
//   sum of decoded addends + sum of new residuals = sum of addends + sum of old residuals
//
// A sum by the plain wire (an exact step) adds the residual too and leaves none. A parameter to
// which this rank adds no gradient keeps its residual: if no rank adds a gradient, no update could
// use the residual. The sums of a window change only Feedback::next. commit() makes it the residual
// when an update follows. If the window is dropped instead (zero_grad(), gradients that are not
// finite), Feedback::next is dropped too.
//
// A checkpoint has the mean over the ranks, which is all that later updates depend on. So a run
// with another number of ranks, another layout or another wire can go on from it.
//
// Used only by the model's thread, which calls begin() while no move is on the lane, or for the
// next move. As an exception, the update lane calls drop() for gradients that were used. This is
// after commit(), when there is nothing left to drop.
#include <ATen/core/Tensor.h>

#include <string>

#include "src/device/wire_codec.h"
#include "src/exec/rank.h"

namespace penstock::exec {

class Residuals {
 public:
  explicit Residuals(Rank& rank) : rank_(rank) {}

  // Returns whether a sum of this table has residuals on this mesh.
  bool used() const;
  // Returns where a walk that is about to begin reads and writes the flat's residual. Returns {} if
  // the walk has no sum with residuals. `retired` receives memory that must live until the walk has
  // ended.
  Travel::Fed begin(Flat& flat, const Route& route, mem::Lease* retired);
  // Must be called when an update of all gradients has begun. Makes Feedback::next the residual.
  // The norm has already found which parameters have a gradient on any rank. `factor`: the divisor
  // of a full window divided by the divisor of this window.
  void commit(double factor);
  static void drop(Flat& flat) { flat.residual.next.reset(); }

  // Returns the placement of means. It is sharded over as many axes as possible, but its shards
  // must lie inside the shards of residuals.
  Placement saved() const;
  // [stage] Returns this rank's part, in fp32 in host memory, of the mean over the data ranks.
  at::Tensor mean(const Flat& flat, const std::string& label);
  // Adds up means over the ranks of model axes that have addends of one gradient.
  void add_holders(const Flat& flat, const at::Tensor& part, const std::string& label);
  // Replaces the residual by one with this mean. `part`: as mean() and add_holders() return it;
  // undefined: zero.
  void set_mean(Flat& flat, const at::Tensor& part);

 private:
  Buffer room_for(const Flat& flat) const;
  void restore(Flat& flat, const Slot& slot);
  void rescale(Flat& flat, double factor);

  Rank& rank_;
};

}  // namespace penstock::exec
