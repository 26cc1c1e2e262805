#pragma once
// DeviceCollectives: runs collectives on device memory among the ranks of one torch back end. The
// collectives are queued on the calling thread's stream. One thread at a time may call a method,
// unless the method's comment says otherwise.
#include <ATen/core/Tensor.h>
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
#include "src/device/stream_event.h"

namespace c10d {
class Backend;
}  // namespace c10d

namespace penstock::comm {

// Thrown by calls after abort(). The text is the reason for the abort.
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

  // [all ranks] Connects the ranks for collectives on that device. Without this call, some back
  // ends would connect during their first collective, where abort() cannot end the attempt. Throws
  // Aborted after refuse(), and std::exception if the ranks are not connected within `limit`.
  void connect(c10::Device device, std::chrono::milliseconds limit);

  // Calls `queue`, which calls some of the collectives below. These collectives work on `stream`.
  // Throws Aborted after refuse().
  void run(const Position& position, const c10::Stream& stream, const std::function<void()>& queue);

  // All elements of `gathers` are gathered together. `own` is this rank's shard at its place in
  // `full`.
  struct Gather {
    at::Tensor full, own;
  };
  void all_gather(std::vector<Gather>& gathers);
  // Sends row i of `sent` to rank i and receives rank i's row in row i of `received`.
  void all_to_all(at::Tensor received, at::Tensor sent);
  // Sends all of `sent` to rank `to`, and receives `received` from rank `from`. `size`: the number
  // of ranks.
  void shift(at::Tensor received, at::Tensor sent, int from, int to, int size);
  // Writes this rank's row of the sum. The sum is computed in the dtype of `partial`.
  void reduce_scatter(at::Tensor result, at::Tensor partial);
  void broadcast(const at::Tensor& values);  // sends the group's first rank's values

  // Returns the first unfinished collective on the device, and the time when it became the first.
  // Returns nothing if there is none, and after abort(). Any thread.
  struct Pending {
    Position position;
    std::chrono::steady_clock::time_point since;
  };
  std::optional<Pending> oldest();
  // Refuses new collectives. Any thread.
  void refuse(const std::string& why);
  // Call after refuse(). Aborts unfinished collectives, whose output is then undefined. Returns the
  // first collective that was aborted, if any. Any thread.
  std::optional<Position> abort();
  // Call when nothing is queued. Ends the threads and connections of the back end. If the back end
  // waits for its peers, this function returns after two seconds, and the wait continues on another
  // thread.
  void shut_down();

 private:
  struct Queued {
    Pending pending;
    std::optional<device::StreamEvent> end;  // unset while the collective is being queued; queueing
                                             // may wait for a peer
  };
  void forget_ended();
  bool is_refused();
  bool call(const std::function<void(c10d::Backend&)>& call, c10::Device device,
            std::chrono::milliseconds limit);

  const c10::intrusive_ptr<c10d::Backend> back_end_;
  std::mutex mutex_;
  std::string refused_;  // the reason; guarded by mutex_, like the members below
  bool aborted_ = false;
  std::optional<c10::Device> device_;              // of the collectives
  std::deque<Queued> queued_;                      // in order
  std::chrono::steady_clock::time_point ended_{};  // when a finished collective was last seen
};

}  // namespace penstock::comm
