#pragma once
// Peers: the ranks that compute one operator together (the tensor axis), as operators see them.
// Every rank makes the same calls in the same order, in forward, in backward and where a forward is
// computed again. What is returned is contiguous and shares no memory with what was given, whatever
// strides that has.
#include <ATen/core/Tensor.h>

#include <memory>

#include "penstock/group.h"
#include "src/comm/channel.h"
#include "src/place/groups.h"

namespace penstock::parallel {

class Peers {
 public:
  // The group outlives it. `members`: this rank and those that it computes with.
  Peers(Group& group, const Members& members);

  int rank() const { return members_.index; }
  int size() const { return members_.size(); }

  // The ranks' addends, each of this shape and dtype: their sum, made in fp32 for low precision,
  // equal on all ranks.
  at::Tensor sum(const at::Tensor& addend);
  // The ranks' parts along `dim`, of equal sizes, in their order.
  at::Tensor gather(const at::Tensor& part, int64_t dim);
  // This rank's part along `dim` of the sum. Throws c10::Error where it does not divide evenly.
  at::Tensor sum_and_cut(const at::Tensor& addend, int64_t dim);

  // This rank's part along `dim`; nothing is exchanged.
  at::Tensor cut(const at::Tensor& whole, int64_t dim) const;

 private:
  void check(const at::Tensor& values, int64_t dim) const;
  at::Tensor reduce(const at::Tensor& addend, bool gathers);

  const Members members_;
  comm::Channel channel_;
};

}  // namespace penstock::parallel
