#pragma once
// DeviceCollectives: those of a back end of torch's that works on a device's memory, among its
// ranks. They are queued on this thread's stream. One thread at a time, but for what says
// otherwise.
#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "penstock/group.h"

namespace c10d {
class Backend;
}  // namespace c10d

namespace penstock::comm {

class DeviceCollectives {
 public:
  explicit DeviceCollectives(c10::intrusive_ptr<c10d::Backend> back_end);
  ~DeviceCollectives();
  DeviceCollectives(const DeviceCollectives&) = delete;
  DeviceCollectives& operator=(const DeviceCollectives&) = delete;

  // `queue` calls some of those below, which work on `stream`. Throws why abort() was called.
  void run(const Position& position, const c10::Stream& stream, const std::function<void()>& queue);

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

  // From any thread. The first that the device has not ended.
  struct Pending {
    Position position;
    std::chrono::steady_clock::time_point since;
  };
  std::optional<Pending> oldest();
  // From any thread. What is queued gives up; what it would have written is undefined.
  void abort(const std::string& why);
  // In order: the other ranks need not be there, and nothing is queued.
  void shut_down();

 private:
  struct Queued {
    Pending pending;
    c10::Event end;
  };
  void forget_ended();

  const c10::intrusive_ptr<c10d::Backend> back_end_;
  std::mutex mutex_;
  std::string aborted_;        // guarded by mutex_, as below: why
  std::deque<Queued> queued_;  // in order
};

}  // namespace penstock::comm
