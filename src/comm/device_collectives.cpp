#include "src/comm/device_collectives.h"

#include <algorithm>
#include <cstdio>
#include <exception>
#include <thread>
#include <utility>

#include <c10/core/DeviceGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include "src/base/text.h"

namespace penstock::comm {

namespace {

constexpr std::chrono::milliseconds kPollRefusal{20};  // time between two checks for a refusal
constexpr std::chrono::milliseconds kShutDown{2000};   // time for all ranks to shut down

}  // namespace

DeviceCollectives::DeviceCollectives(c10::intrusive_ptr<c10d::Backend> back_end)
    : back_end_(std::move(back_end)) {}

DeviceCollectives::~DeviceCollectives() = default;

// Runs `call` on a thread of its own, because it may wait for peers and cannot be interrupted.
// Returns false if it does not return within `limit`, or if refuse() comes first. The thread then
// keeps running.
bool DeviceCollectives::call(const std::function<void(c10d::Backend&)>& call, c10::Device device,
                             std::chrono::milliseconds limit) {
  struct Called {
    std::mutex mutex;
    std::condition_variable ended;
    bool over = false;
    std::exception_ptr error;
  };
  const auto called = std::make_shared<Called>();
  std::thread([called, call, device, back_end = back_end_] {
    std::exception_ptr error;
    try {
      const c10::DeviceGuard guard(device);  // [Note: Contexts]
      call(*back_end);
    } catch (...) {
      error = std::current_exception();
    }
    const std::lock_guard lock(called->mutex);
    called->error = error;
    called->over = true;
    called->ended.notify_all();
  }).detach();
  const auto deadline = std::chrono::steady_clock::now() + limit;
  std::unique_lock lock(called->mutex);
  while (!called->over && std::chrono::steady_clock::now() < deadline) {
    called->ended.wait_for(lock, kPollRefusal, [&] { return called->over; });
    if (!called->over && is_refused()) return false;
  }
  if (called->error) std::rethrow_exception(called->error);
  return called->over;
}

bool DeviceCollectives::is_refused() {
  const std::lock_guard lock(mutex_);
  return !refused_.empty();
}

void DeviceCollectives::connect(c10::Device device, std::chrono::milliseconds limit) {
  const auto eagerly = [device](c10d::Backend& it) { it.eagerConnectSingleDevice(device); };
  {
    const std::lock_guard lock(mutex_);
    device_ = device;
  }
  if (call(eagerly, device, limit)) return;
  const std::lock_guard lock(mutex_);
  if (!refused_.empty()) throw Aborted(refused_);
  throw std::runtime_error(
      concat("timed out after ", static_cast<double>(limit.count()) / 1e3, " s"));
}

void DeviceCollectives::run(const Position& position, const c10::Stream& stream,
                            const std::function<void()>& queue) {
  {
    const std::lock_guard lock(mutex_);
    if (!refused_.empty()) throw Aborted(refused_);
    device_ = stream.device();
    forget_ended();
    queued_.push_back({{position, std::chrono::steady_clock::now()}, {}});
  }
  // queue() runs without the lock: it may wait for a peer, and abort() must be able to end that
  // wait.
  try {
    queue();
    device::StreamEvent end(stream);
    const std::lock_guard lock(mutex_);
    if (!queued_.empty()) queued_.back().end.emplace(std::move(end));
  } catch (const std::exception&) {
    const std::lock_guard lock(mutex_);
    if (!queued_.empty()) queued_.pop_back();
    if (!refused_.empty()) throw Aborted(refused_);
    throw;
  }
}

void DeviceCollectives::all_gather(std::vector<Gather>& gathers) {
  c10d::AllgatherOptions options;
  options.asyncOp = false;
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  // All buffers share one launch if the back end supports it.
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

void DeviceCollectives::shift(at::Tensor received, at::Tensor sent, int from, int to, int size) {
  c10d::AllToAllOptions options;
  options.asyncOp = false;
  std::vector<int64_t> receives(size), sends(size);
  receives[from] = received.size(0);
  sends[to] = sent.size(0);
  if (const auto work = back_end_->alltoall_base(received, sent, receives, sends, options)) {
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
  while (!queued_.empty() && queued_.front().end) {
    try {
      if (!queued_.front().end->query()) return;
    } catch (const std::exception&) {
      // The device has failed, and the next wait on it throws.
    }
    queued_.pop_front();
    ended_ = std::chrono::steady_clock::now();
  }
}

std::optional<DeviceCollectives::Pending> DeviceCollectives::oldest() {
  const std::lock_guard lock(mutex_);
  if (aborted_) return {};
  const c10::OptionalDeviceGuard guard(device_);  // [Note: Contexts]
  forget_ended();
  if (queued_.empty()) return {};
  const Pending& first = queued_.front().pending;
  return Pending{first.position, std::max(first.since, ended_)};
}

void DeviceCollectives::refuse(const std::string& why) {
  const std::lock_guard lock(mutex_);
  if (refused_.empty()) refused_ = why;
}

std::optional<Position> DeviceCollectives::abort() {
  std::optional<Position> cut_off;
  {
    const std::lock_guard lock(mutex_);
    if (aborted_) return {};
    aborted_ = true;
    const c10::OptionalDeviceGuard guard(device_);  // [Note: Contexts]
    forget_ended();
    if (!queued_.empty()) cut_off = queued_.front().pending.position;
  }
  try {
    back_end_->abort();
  } catch (const std::exception& error) {  // on threads that no caller waits for
    std::fprintf(stderr, "penstock: a device's collectives did not end: %s\n",
                 reason(error).c_str());
  }
  return cut_off;
}

void DeviceCollectives::shut_down() {
  {
    const std::lock_guard lock(mutex_);
    if (aborted_ || !device_) return;
  }
  try {
    call([](c10d::Backend& it) { it.shutdown(); }, *device_, kShutDown);
  } catch (const std::exception& error) {  // the engine is closed, and no call can report this
    std::fprintf(stderr, "penstock: a device's collectives did not shut down: %s\n",
                 reason(error).c_str());
  }
}

}  // namespace penstock::comm
