#pragma once
// Peers: the ranks that compute one operator together (of the tensor or the sequence axis), as
// operators see them.
// Every rank makes the same calls in the same order, with the same labels, which are compared: in
// forward, in backward and where a forward is computed again. What is returned is contiguous and
// shares no memory with what was given, whatever strides that has.
#include <ATen/core/Tensor.h>

#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "penstock/group.h"
#include "src/comm/channel.h"
#include "src/place/groups.h"

namespace penstock::parallel {

class Peers {
 public:
  // `members`: this rank and those that it computes with.
  Peers(std::shared_ptr<Group> group, const Members& members, const char* lane = "act");

  // What its exchanges threw since the last call: on its way through autograd it loses its class.
  std::exception_ptr take_fault() { return std::exchange(fault_, nullptr); }
  // No more exchanges: what asks for one (a graph that outlives its engine) throws RuntimeFault.
  void close() { closed_ = true; }
  void set_step(int64_t step) { channel_.set_step(step); }  // for messages
  void record(std::shared_ptr<trace::Recorder> recorder) {
    channel_.recorder = std::move(recorder);
  }

  int rank() const { return members_.index; }
  int size() const { return members_.size(); }

  // The ranks' addends, each of this shape and dtype: their sum, made in fp32 for low precision,
  // equal on all ranks.
  at::Tensor sum(const at::Tensor& addend, const comm::Label& label);
  // The ranks' parts along `dim`, in their order: of equal sizes, or (`size` >= 0) each rank's
  // share() of so many together.
  at::Tensor gather(const at::Tensor& part, int64_t dim, int64_t size, const comm::Label& label);
  // This rank's part along `dim` of the sum. Throws c10::Error where it does not divide evenly.
  at::Tensor sum_and_cut(const at::Tensor& addend, int64_t dim, const comm::Label& label);

  // This rank's values in as many parts along `cut_dim` as there are ranks, one for each; what came
  // from them, in their order, joined along `join_dim`. Throws c10::Error where it does not divide.
  at::Tensor all_to_all(const at::Tensor& values, int64_t cut_dim, int64_t join_dim,
                        const comm::Label& label);

  // The first rank whose values (their bytes, sizes and dtypes) or text are not those of rank 0, <
  // 0: none; and whether all have the same `other` text.
  std::pair<int, bool> compare(const std::vector<at::Tensor>& values, const std::string& text,
                               const std::string& other);

  // This rank's share() along `dim`; nothing is exchanged.
  at::Tensor cut(const at::Tensor& whole, int64_t dim) const;

 private:
  at::Tensor reduce(const at::Tensor& addend, bool gathers, const comm::Label& label);

  template <class Exchange>
  void exchange(const Exchange& work);

  const std::shared_ptr<Group> group_;
  const Members members_;
  bool closed_ = false;
  std::exception_ptr fault_;
  comm::Channel channel_;
};

}  // namespace penstock::parallel
