#pragma once
// ConnectionWatch: reports at once that a neighbour's process has ended. It posts a receive for a
// message that no rank ever sends. The receive fails when the connection closes. The watch is for
// ranks that wait for each other on a device, because such a wait does not notice a lost process.
#include <c10/util/intrusive_ptr.h>

#include <functional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace penstock::comm {

// A tag that no collective uses (Channel::begin()).
inline constexpr int kLifelineTag = 0x7fffffff;

class ConnectionWatch {
 public:
  // This object's own thread calls `cut` when the connection closes, at most once, and not if the
  // object is destroyed first. The back end must have point-to-point operations that can be aborted
  // (gloo).
  ConnectionWatch(c10::intrusive_ptr<c10d::Backend> backend, int peer,
                  std::function<void(const std::string& why)> cut);
  ~ConnectionWatch();
  ConnectionWatch(const ConnectionWatch&) = delete;
  ConnectionWatch& operator=(const ConnectionWatch&) = delete;

 private:
  const c10::intrusive_ptr<c10d::Backend> backend_;
  at::Tensor nothing_;
  c10::intrusive_ptr<c10d::Work> receive_;
  std::thread thread_;
};

}  // namespace penstock::comm
