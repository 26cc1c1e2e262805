#pragma once
// Residuals: what sums of gradients by a lossy wire round away, kept for the next sum.
//
// [Note: Residuals] Each rank keeps the rounding errors of its own addends, so a residual is a
// partial sum with the layout of the addends: only its sum over the ranks has a meaning. A sum adds
// the residual to the addends before it encodes them and keeps the errors of this encoding:
//
//   sum of decoded addends + sum of new residuals = sum of addends + sum of old residuals
//
// A sum by the plain wire (an exact step) adds the residual too and leaves none. Parameters to
// which this rank adds no gradient keep theirs: if no rank adds one, there is no update that could
// use it. The sums of a window change only Feedback::next. commit() makes it the residual when an
// update follows. If the window is dropped instead (zero_grad(), gradients that are not finite), so
// are its residuals.
//
// A checkpoint has the mean over the ranks, which is all that later updates depend on. So a run
// with another number of ranks, another layout or another wire can go on from it.
//
// Used only by the model's thread; begin() while no move is on the lane, or for the next move. The
// update lane calls drop() for gradients that were used, after commit(), when there is nothing to
// drop.
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
  // Returns where a walk that begins reads and writes the flat's residual, if it has a sum with
  // residuals. `retired` receives memory that must live until the walk has ended.
  Travel::Fed begin(Flat& flat, const Route& route, mem::Lease* retired);
  // An update of all gradients has begun: what the window left becomes the residual. The norm has
  // told which parameters have a gradient on any rank. `factor`: between the divisor of a full
  // window and that of this window.
  void commit(double factor);
  static void drop(Flat& flat) { flat.residual.next.reset(); }

  // Returns the placement of means: sharded, as far as its shards are inside those of residuals.
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
