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
#include <stdexcept>
#include <string>
#include <vector>

#include "penstock/group.h"

namespace c10d {
class Backend;
}  // namespace c10d

namespace penstock::comm {

// Of what is called after abort(): why that was.
class Aborted : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class DeviceCollectives {
 public:
  explicit DeviceCollectives(c10::intrusive_ptr<c10d::Backend> back_end);
  ~DeviceCollectives();
  DeviceCollectives(const DeviceCollectives&) = delete;
  DeviceCollectives& operator=(const DeviceCollectives&) = delete;

  // `queue` calls some of those below, which work on `stream`. Throws Aborted.
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

  // From any thread. The first that the device has not ended, and since when nothing else is before
  // it; none after abort().
  struct Pending {
    Position position;
    std::chrono::steady_clock::time_point since;
  };
  std::optional<Pending> oldest();
  // From any thread. No more are queued.
  void refuse(const std::string& why);
  // From any thread, after refuse(): what has not ended gives up, and what it would have written is
  // undefined. Returns the first of them, if there is one.
  std::optional<Position> abort();
  // When nothing is queued; what a back end has on its own ends.
  void shut_down();

 private:
  struct Queued {
    Pending pending;
    std::optional<c10::Event> end;  // none while it is being queued, for which a peer may be needed
  };
  void forget_ended();

  const c10::intrusive_ptr<c10d::Backend> back_end_;
  std::mutex mutex_;
  std::string refused_;  // guarded by mutex_, as below: why
  bool aborted_ = false;
  std::deque<Queued> queued_;                      // in order
  std::chrono::steady_clock::time_point ended_{};  // when the last one was seen to have
};

}  // namespace penstock::comm
