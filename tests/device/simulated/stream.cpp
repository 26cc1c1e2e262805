#include "tests/device/simulated/stream.h"

#include <pthread.h>
#include <c10/util/Exception.h>
#include <c10/util/thread_name.h>

#include <array>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "tests/device/simulated/arena.h"
#include "tests/device/simulated/control.h"
#include "tests/device/simulated/counting.h"

namespace penstock::sim {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kPool = 16;
constexpr int kHighPriorityPool = 8;
constexpr int kStreams = 1 + kPool + kHighPriorityPool;
constexpr std::chrono::seconds kLastWait{5};

struct Delays {
  std::atomic<uint64_t> seed{0};
  std::atomic<int64_t> low_us{0}, high_us{0};
};

// The first error of a device.
struct Failure {
  std::atomic<bool> any{false};
  std::mutex mutex;
  std::string text;  // guarded by mutex
};

// One stream. Its thread is the only one that runs its tasks, in order.
class Worker {
 public:
  Worker(const Delays& delays, int device, int stream)
      : delays_(delays), device_(device), stream_(stream) {
    reseed();
    thread_ = std::thread([this] {
      c10::setThreadName(c10::str("sim ", device_, "/", stream_));
      run();
    });
  }

  void push(Task task, const char* name) {
    std::unique_lock lock(mutex_);
    if (closing_) {  // the process ends, and static objects still free memory
      lock.unlock();
      task();
      return;
    }
    queue_.push_back({std::move(task), name});
    ++accepted_;
    lock.unlock();
    arrived_.notify_one();
  }

  bool idle() {
    const std::lock_guard lock(mutex_);
    return finished_ == accepted_;
  }

  // Waits for the work that is queued now. Returns false if the deadline passed first.
  bool drain(std::optional<Clock::time_point> deadline = {}) {
    std::unique_lock lock(mutex_);
    const auto over = [this, last = accepted_] { return finished_ >= last; };
    if (deadline) return settled_.wait_until(lock, *deadline, over);
    settled_.wait(lock, over);
    return true;
  }

  void reseed() {
    const std::lock_guard lock(mutex_);
    const uint64_t seed = delays_.seed;
    std::seed_seq words{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32),
                        static_cast<uint32_t>(device_), static_cast<uint32_t>(stream_)};
    random_.seed(words);
    left_ = 0;
  }

  void close() {
    {
      const std::lock_guard lock(mutex_);
      closing_ = true;
    }
    arrived_.notify_one();
    thread_.join();
  }

 private:
  struct Item {
    Task task;
    const char* name;  // null: work of the allocator
  };

  // With uniform delays the streams advance at the same pace, which hides missing waits. So each
  // stream alternates between fast and slow periods.
  std::chrono::microseconds draw_delay() {
    const int64_t low = delays_.low_us, high = delays_.high_us;
    if (high <= 0) return {};
    if (left_-- <= 0) {
      left_ = static_cast<int>(random_() % 12);
      factor_ = std::array{0, 0, 1, 8}[random_() % 4];
    }
    return std::chrono::microseconds(factor_ * std::uniform_int_distribution(low, high)(random_));
  }

  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      arrived_.wait(lock, [this] { return closing_ || !queue_.empty(); });
      if (queue_.empty()) return;
      Item item = std::move(queue_.front());
      queue_.pop_front();
      const auto delay = item.name ? draw_delay() : std::chrono::microseconds{};
      lock.unlock();
      if (delay.count() > 0) std::this_thread::sleep_for(delay);
      perform(item);
      item.task = nullptr;
      lock.lock();
      ++finished_;
      settled_.notify_all();
    }
  }

  void perform(const Item& item) {
    const char* name = item.name ? item.name : "the allocator";
    try {
      item.task();
    } catch (const c10::Error& error) {
      fail(device_, c10::str(name, ": ", error.what_without_backtrace()));
    } catch (const std::exception& error) {
      fail(device_, c10::str(name, ": ", error.what()));
    }
  }

  const Delays& delays_;
  const int device_, stream_;
  std::mutex mutex_;
  std::condition_variable arrived_, settled_;
  std::deque<Item> queue_;  // mutex_ guards this and all members below
  uint64_t accepted_ = 0, finished_ = 0;
  std::mt19937 random_;
  int left_ = 0, factor_ = 1;
  bool closing_ = false;
  std::thread thread_;
};

// All streams of all devices. Never destroyed. AtExit ends the threads when the library is
// unloaded.
struct Machine {
  Delays delays;
  std::array<Failure, kDevices> failures;
  std::mutex mutex;  // held while a worker is started
  std::array<std::array<std::atomic<Worker*>, kStreams>, kDevices> workers{};
  std::array<std::atomic<unsigned>, kDevices> next{}, next_high_priority{};
  std::atomic<bool> forked{false}, allocations_wait{false};
  std::array<std::atomic<bool>, kDevices> contexts{};

  std::vector<Worker*> started(int device) const {
    std::vector<Worker*> all;
    for (const auto& worker : workers[device]) {
      if (Worker* one = worker.load()) all.push_back(one);
    }
    return all;
  }

  // Waits at most kLastWait for all streams together. Returns the streams that are idle then.
  std::vector<Worker*> settle() const {
    const auto deadline = Clock::now() + kLastWait;
    std::vector<Worker*> idle;
    for (int device = 0; device < kDevices; ++device) {
      for (Worker* worker : started(device)) {
        if (worker->drain(deadline)) idle.push_back(worker);
      }
    }
    return idle;
  }
};

Machine& machine() {
  static Machine* const machine = [] {
    auto* created = new Machine;
    pthread_atfork(nullptr, nullptr, [] { sim::machine().forked = true; });
    return created;
  }();
  return *machine;
}

// Destroyed before torch's own static objects, which queued work may need. A stuck stream (for
// example in a collective without its peers) keeps its thread until the process ends.
struct AtExit {
  ~AtExit() {
    if (is_forked()) return;
    for (Worker* worker : machine().settle()) worker->close();
  }
} at_exit;

thread_local int device_of_thread = 0;
thread_local std::array<int, kDevices> streams_of_thread{};

int checked(int device) {
  if (device < 0) return device_of_thread;
  TORCH_CHECK(device < kDevices, "[sim] there is no device ", device, " of ", kDevices);
  return device;
}

c10::Stream stream_of(int device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, sim_device(device), id);
}

Worker& worker(c10::Stream stream) {
  Machine& all = machine();
  TORCH_CHECK(!all.forked, "[sim] the device cannot be used in a forked process");
  TORCH_CHECK(
      stream.device_type() == c10::kPrivateUse1 && stream.id() >= 0 && stream.id() < kStreams,
      "[sim] not a stream of the device: ", stream);
  const int device = checked(stream.device_index());
  const int id = static_cast<int>(stream.id());
  auto& slot = all.workers[device][id];
  if (Worker* started = slot.load(std::memory_order_acquire)) return *started;
  const std::lock_guard lock(all.mutex);
  if (!slot) slot = new Worker(all.delays, device, id);
  return *slot;
}

void wait(const Mark& mark) { mark.done.wait(false, std::memory_order_acquire); }

}  // namespace

int current_device() { return device_of_thread; }

int exchange_device(int device) {
  device = checked(device);
  machine().contexts[device] = true;
  return std::exchange(device_of_thread, device);
}

void visit_device(int device) {
  device = checked(device);
  machine().contexts[device] = true;
  machine().contexts[device_of_thread] = true;
}

void forget_contexts() {
  for (auto& context : machine().contexts) context = false;
}

std::vector<int> contexts() {
  std::vector<int> all;
  for (int device = 0; device < kDevices; ++device) {
    if (machine().contexts[device]) all.push_back(device);
  }
  return all;
}

void set_current_device(int device) noexcept { device_of_thread = device; }

c10::Stream current_stream(int device) {
  device = checked(device);
  return stream_of(device, streams_of_thread[device]);
}

c10::Stream default_stream(int device) { return stream_of(checked(device), 0); }

c10::Stream exchange_stream(c10::Stream stream) {
  const int device = checked(stream.device_index());
  const auto id = static_cast<int>(stream.id());
  return stream_of(device, std::exchange(streams_of_thread[device], id));
}

c10::Stream pool_stream(int device, bool high_priority) {
  device = checked(device);
  if (high_priority) {
    const unsigned turn = machine().next_high_priority[device]++;
    return stream_of(device, 1 + kPool + turn % kHighPriorityPool);
  }
  return stream_of(device, 1 + machine().next[device]++ % kPool);
}

void launch(c10::Stream stream, const char* name, Task task) {
  worker(stream).push(std::move(task), name);
}

void enqueue(c10::Stream stream, Task task) { worker(stream).push(std::move(task), nullptr); }

MarkPointer record(c10::Stream stream) {
  auto mark = std::make_shared<Mark>();
  enqueue(stream, [mark] {
    mark->time = Clock::now();
    mark->done.store(true, std::memory_order_release);
    mark->done.notify_all();
  });
  return mark;
}

void block(c10::Stream stream, MarkPointer mark) {
  if (mark) enqueue(stream, [mark = std::move(mark)] { wait(*mark); });
}

bool is_done(const MarkPointer& mark) {
  return !mark || mark->done.load(std::memory_order_acquire);
}

bool is_idle(c10::Stream stream) { return worker(stream).idle(); }

void* native_handle(c10::Stream stream) { return &worker(stream); }

void synchronize(c10::Stream stream, const std::string& why) {
  count_host_wait(why);
  worker(stream).drain();
  throw_if_failed(stream.device_index());
}

void synchronize(int device, const MarkPointer& mark, const std::string& why) {
  count_host_wait(why);
  drain(mark);
  throw_if_failed(checked(device));
}

void synchronize_device(int device, const std::string& why) {
  count_host_wait(why);
  device = checked(device);
  drain_device(device);
  throw_if_failed(device);
}

void drain(const MarkPointer& mark) {
  if (mark) wait(*mark);
}

void drain_device(int device) {
  for (Worker* started : machine().started(device)) started->drain();
}

void note_new_memory(const std::string& why) {
  count_host_wait(why);
  if (!machine().allocations_wait) return;
  for (int device = 0; device < kDevices; ++device) drain_device(device);
}

void set_allocations_wait(bool wait) { machine().allocations_wait = wait; }

void fail(int device, const std::string& error) {
  Failure& failure = machine().failures[device];
  const std::lock_guard lock(failure.mutex);
  if (failure.any) return;
  failure.text = error;
  failure.any = true;
}

bool has_failed(int device) { return machine().failures[device].any; }

void throw_if_failed(int device) {
  Failure& failure = machine().failures[device];
  if (!failure.any) return;
  const std::lock_guard lock(failure.mutex);
  if (!failure.any) return;
  throw c10::AcceleratorError(
      {__func__, __FILE__, __LINE__}, 1,
      c10::str("[sim] asynchronous error on device ", device, ": ", failure.text));
}

void reset_errors() {
  machine().settle();
  for (Failure& failure : machine().failures) {
    const std::lock_guard lock(failure.mutex);
    failure.any = false;
  }
}

void set_seed(uint64_t seed) {
  machine().delays.seed = seed;
  for (int device = 0; device < kDevices; ++device) {
    for (Worker* started : machine().started(device)) started->reseed();
  }
}

void set_delays_us(int64_t low_us, int64_t high_us) {
  TORCH_CHECK_VALUE(low_us >= 0 && low_us <= high_us, "[sim] invalid delays: ", low_us, " to ",
                    high_us);
  machine().delays.low_us = low_us;
  machine().delays.high_us = high_us;
}

void drain() {
  if (!is_forked()) machine().settle();
}

bool is_forked() { return machine().forked; }

}  // namespace penstock::sim
