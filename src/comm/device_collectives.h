#pragma once
// DeviceCollectives: those of a back end of torch's that works on a device's memory, among its
// ranks. They are queued on this thread's stream. One thread at a time.
#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <vector>

namespace c10d {
class Backend;
}  // namespace c10d

namespace penstock::comm {

class DeviceCollectives {
 public:
  explicit DeviceCollectives(c10::intrusive_ptr<c10d::Backend> back_end);
  ~DeviceCollectives();

  // `full` has this rank's part, `own`, in its place. All of them together.
  struct Gather {
    at::Tensor full, own;
  };
  void all_gather(std::vector<Gather>& gathers);
  // Row i of `sent` goes to rank i, whose row arrives in `received`.
  void all_to_all(at::Tensor received, at::Tensor sent);
  // This rank's row of the sum, in the dtype that it has on the wire.
  void reduce_scatter(at::Tensor result, at::Tensor partial);
  void broadcast(const at::Tensor& values);  // of the group's first rank

 private:
  const c10::intrusive_ptr<c10d::Backend> back_end_;
};

}  // namespace penstock::comm
