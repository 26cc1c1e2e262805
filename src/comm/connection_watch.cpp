#include "src/comm/connection_watch.h"

#include <ATen/ops/empty.h>
#include <c10/util/thread_name.h>

#include <chrono>
#include <exception>
#include <utility>
#include <vector>

#include "src/base/text.h"
#include "src/comm/timeouts.h"

namespace penstock::comm {

ConnectionWatch::ConnectionWatch(c10::intrusive_ptr<c10d::Backend> backend, int peer,
                                 std::function<void(const std::string&)> cut)
    : backend_(std::move(backend)), nothing_(at::empty({1}, at::TensorOptions(at::kByte))) {
  std::vector<at::Tensor> tensors{nothing_};
  receive_ = backend_->recv(tensors, peer, kLifelineTag);
  thread_ = std::thread([this, peer, cut = std::move(cut)] {
    c10::setThreadName("penstock-line");
    try {
      receive_->wait(kForever);
    } catch (const std::exception& error) {
      cut(concat("the connection to rank ", peer, " is closed (", reason(error), ")"));
    }
  });
}

ConnectionWatch::~ConnectionWatch() {
  receive_->abort();
  thread_.join();
}

}  // namespace penstock::comm
