#include "src/comm/device_collectives.h"

#include <exception>
#include <stdexcept>
#include <utility>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace penstock::comm {

DeviceCollectives::DeviceCollectives(c10::intrusive_ptr<c10d::Backend> back_end)
    : back_end_(std::move(back_end)) {}

DeviceCollectives::~DeviceCollectives() = default;

void DeviceCollectives::run(const Position& position, const c10::Stream& stream,
                            const std::function<void()>& queue) {
  {
    const std::lock_guard lock(mutex_);
    if (!aborted_.empty()) throw std::runtime_error(aborted_);
    forget_ended();
  }
  const auto since = std::chrono::steady_clock::now();
  try {
    queue();
  } catch (const std::exception&) {
    const std::lock_guard lock(mutex_);
    if (!aborted_.empty()) throw std::runtime_error(aborted_);
    throw;
  }
  c10::Event end(stream.device_type());
  end.record(stream);
  const std::lock_guard lock(mutex_);
  queued_.push_back({{position, since}, std::move(end)});
}

void DeviceCollectives::all_gather(std::vector<Gather>& gathers) {
  c10d::AllgatherOptions options;
  options.asyncOp = false;
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  const bool together = gathers.size() > 1 && back_end_->supportsCoalescing();
  if (together) back_end_->startCoalescing();
  for (Gather& one : gathers) {
    works.push_back(back_end_->_allgather_base(one.full, one.own, options));
  }
  if (together) works.push_back(back_end_->endCoalescing());
  for (const auto& work : works) {
    if (work) work->wait();
  }
}

void DeviceCollectives::all_to_all(at::Tensor received, at::Tensor sent) {
  c10d::AllToAllOptions options;
  options.asyncOp = false;
  std::vector<int64_t> equal;
  if (const auto work = back_end_->alltoall_base(received, sent, equal, equal, options)) {
    work->wait();
  }
}

void DeviceCollectives::reduce_scatter(at::Tensor result, at::Tensor partial) {
  c10d::ReduceScatterOptions options;
  options.reduceOp = c10d::ReduceOp::SUM;
  options.asyncOp = false;
  if (const auto work = back_end_->_reduce_scatter_base(result, partial, options)) work->wait();
}

void DeviceCollectives::broadcast(const at::Tensor& values) {
  c10d::BroadcastOptions options;
  options.asyncOp = false;
  std::vector<at::Tensor> tensors{values};
  if (const auto work = back_end_->broadcast(tensors, options)) work->wait();
}

void DeviceCollectives::forget_ended() {
  while (!queued_.empty()) {
    try {
      if (!queued_.front().end.query()) return;
    } catch (
        const std::exception&) {  // of a device that failed, which whoever waits for it is told
    }
    queued_.pop_front();
  }
}

std::optional<DeviceCollectives::Pending> DeviceCollectives::oldest() {
  const std::lock_guard lock(mutex_);
  forget_ended();
  if (queued_.empty()) return {};
  return queued_.front().pending;
}

void DeviceCollectives::abort(const std::string& why) {
  {
    const std::lock_guard lock(mutex_);
    if (!aborted_.empty()) return;
    aborted_ = why;
  }
  back_end_->abort();
}

void DeviceCollectives::shut_down() {
  const std::lock_guard lock(mutex_);
  queued_.clear();
  if (aborted_.empty()) back_end_->shutdown();
}

}  // namespace penstock::comm
