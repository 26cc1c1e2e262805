#pragma once
// Peers: exchanges between the tensor or sequence ranks that compute one operator together. Every
// rank makes the same calls in the same order, in forward, in backward and in recomputed forwards.
// The labels must be equal on all ranks. An exchange in host memory checks its label. The labels of
// exchanges on a device are checked by the next compare(). Results are contiguous and share no
// memory with the arguments, which may have any strides.
//
// Values are in host memory or on the device where the ranks compute. On a device, exchanges are
// queued on the calling thread's stream, and the host does not wait for them. If the group has no
// back end for the device (Group::device_groups), values go through host memory
// ([Note: Between devices]).
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "penstock/group.h"
#include "src/comm/channel.h"
#include "src/comm/launch_order.h"
#include "src/device/device.h"
#include "src/place/groups.h"
#include "src/place/placement.h"

namespace penstock::parallel {

class Peers {
 public:
  // [members] `members`: this rank and its peers. Throws RuntimeFault if they cannot be connected
  // for exchanges on the device.
  Peers(std::shared_ptr<Group> group, const Members& members, const char* lane = "act",
        const device::Device& computes = device::Device::host());

  // Returns the exception that an exchange threw since the last call, or null. Autograd passes on
  // only the text of an exception, so the exception itself is kept here.
  std::exception_ptr take_fault() { return std::exchange(fault_, nullptr); }
  // Ends all exchanges. If a graph outlives its engine and makes an exchange after close(), this
  // exchange throws RuntimeFault.
  void close() {
    closed_ = true;
    watch_ = nullptr;
  }
  void set_step(int64_t step) { channel_.set_step(step); }  // the step in error texts
  void record(std::shared_ptr<trace::Recorder> recorder) {
    channel_.recorder = std::move(recorder);
  }
  // Called before each exchange, with the bytes that this rank sends.
  using Watch = std::function<void(MoveKind kind, const comm::Label& label, int64_t sent)>;
  void watch(Watch watch) { watch_ = std::move(watch); }

  // Returns a hash of the exchanges on the device so far.
  uint64_t history() const { return channel_.history(); }
  int rank() const { return members_.index; }
  int size() const { return members_.size(); }

  // Returns the sum of the ranks' addends, which must have the same shape and dtype. Sums of
  // low-precision addends are computed in fp32. The sum is equal on all ranks.
  at::Tensor sum(const at::Tensor& addend, const comm::Label& label);
  // Returns the ranks' parts joined along `dim`, in rank order. If `size` < 0, the parts have equal
  // sizes. Otherwise each rank has its share() of `size`.
  at::Tensor gather(const at::Tensor& part, int64_t dim, int64_t size, const comm::Label& label);
  // Returns this rank's part of the sum along `dim`. Throws c10::Error if the size is not divisible
  // by the number of ranks.
  at::Tensor sum_and_cut(const at::Tensor& addend, int64_t dim, const comm::Label& label);

  // Cuts `values` along `cut_dim` into one equal part for each rank and sends each rank its part.
  // Returns the received parts joined along `join_dim`, in rank order. Throws c10::Error if the
  // size is not divisible by the number of ranks.
  at::Tensor all_to_all(const at::Tensor& values, int64_t cut_dim, int64_t join_dim,
                        const comm::Label& label);

  // Sends `values` to the next rank, and returns the values of the previous rank. The last rank
  // sends to the first. All ranks' values must have the same shape and dtype.
  at::Tensor shift(const at::Tensor& values, const comm::Label& label);

  // Compares this rank's `values` (bytes, sizes and dtypes), `text` and exchanges on the device so
  // far with those of rank 0. Returns the first rank that differs (< 0: none), and whether all
  // ranks have the same `other` text.
  std::pair<int, bool> compare(const std::vector<at::Tensor>& values, const std::string& text,
                               const std::string& other);

  // Returns this rank's share() along `dim`. Exchanges nothing.
  at::Tensor cut(const at::Tensor& whole, int64_t dim) const;

 private:
  at::Tensor reduce(const at::Tensor& addend, bool gathers, const comm::Label& label);

  // The arguments of watch_ for an exchange, and whether its values are in host memory.
  struct ExchangeFacts {
    MoveKind kind;
    const comm::Label& label;
    int64_t sent;
    bool on_host;
  };
  template <class Exchange>
  void exchange(const ExchangeFacts& facts, const Exchange& work);
  void check_memory(const at::Tensor& values) const;

  const std::shared_ptr<Group> group_;
  const Members members_;
  const device::Device computes_;
  Watch watch_;
  bool closed_ = false;
  std::exception_ptr fault_;
  comm::Channel channel_;
  std::optional<comm::LaunchOrder> launches_;  // set if the peers exchange on a device
};

}  // namespace penstock::parallel
