#pragma once
// ConnectionWatch: tells at once that a neighbour's process has ended. Nobody sends what it
// receives, and the receive fails when the connection does. For ranks that wait for one another on
// a device, where nothing else would notice.
#include <c10/util/intrusive_ptr.h>

#include <functional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace penstock::comm {

// No collective has it (channel.cpp).
inline constexpr int kLifelineTag = 0x7fffffff;

class ConnectionWatch {
 public:
  // `cut` is called on a thread of its own, at most once, unless this object goes first. Backends
  // with point-to-point operations that can be aborted (gloo).
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
