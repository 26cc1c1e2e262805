#include "src/mem/block_io.h"

#include <liburing.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace penstock::mem {

namespace {

// Requests that are not submitted to the system yet. A disk can read and write at once. So if both
// reads and writes wait, the system gets as many reads as writes.
class WaitingRequest {
 public:
  void push(BlockRequest request) {
    queues_[static_cast<size_t>(request.write)].push_back(std::move(request));
  }
  bool empty() const { return queues_[0].empty() && queues_[1].empty(); }
  BlockRequest take() {  // requires !empty()
    size_t kind = 1 - last_;
    if (num_taken_[kind] > num_taken_[last_]) kind = last_;
    if (queues_[kind].empty()) kind = 1 - kind;
    ++num_taken_[kind];
    last_ = kind;
    BlockRequest request = std::move(queues_[kind].front());
    queues_[kind].pop_front();
    return request;
  }
  void ended(const BlockRequest& request) { --num_taken_[static_cast<size_t>(request.write)]; }
  int num_taken() const { return num_taken_[0] + num_taken_[1]; }

 private:
  std::array<std::deque<BlockRequest>, 2> queues_;  // reads, writes
  std::array<int, 2> num_taken_{};                  // taken and not ended, by kind
  size_t last_ = 1;                                 // kind taken last
};

// Reads at any offset into any memory, through aligned memory. The result is that of pread().
class UnalignedRead {
 public:
  ssize_t operator()(const BlockRequest& request) {
    const int64_t begin = request.offset / kBlockBytes * kBlockBytes;
    const int64_t bytes = block_padded(request.offset + request.bytes - begin);
    if (bytes > room_) {
      memory_.reset(std::aligned_alloc(kBlockBytes, static_cast<size_t>(bytes)));
      room_ = memory_ ? bytes : 0;
      if (!memory_) {
        errno = ENOMEM;
        return -1;
      }
    }
    const ssize_t moved = pread(request.file, memory_.get(), static_cast<size_t>(bytes), begin);
    if (moved < 0) return moved;
    const int64_t found = std::clamp(begin + moved - request.offset, int64_t{0}, request.bytes);
    std::memcpy(request.data, static_cast<char*>(memory_.get()) + (request.offset - begin),
                static_cast<size_t>(found));
    return found;
  }

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  std::unique_ptr<void, Free> memory_;
  int64_t room_ = 0;
};

class ThreadIo final : public BlockIo {
 public:
  explicit ThreadIo(int num_threads) {
    for (int i = 0; i < num_threads; ++i) threads_.emplace_back([this] { run(); });
  }
  ~ThreadIo() override {
    {
      const std::lock_guard lock(mutex_);
      closing_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  void submit(BlockRequest request) override {
    {
      const std::lock_guard lock(mutex_);
      waiting_.push(std::move(request));
    }
    changed_.notify_one();
  }
  const char* name() const override { return "threads"; }

 private:
  void run() {
    UnalignedRead read_unaligned;
    while (true) {
      BlockRequest request;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return closing_ || !waiting_.empty(); });
        if (waiting_.empty()) return;
        request = waiting_.take();
      }
      const auto bytes = static_cast<size_t>(request.bytes);
      const ssize_t moved =
          request.write        ? pwrite(request.file, request.data, bytes, request.offset)
          : request.any_offset ? read_unaligned(request)
                               : pread(request.file, request.data, bytes, request.offset);
      const int64_t result = moved < 0 ? -errno : moved;
      {
        const std::lock_guard lock(mutex_);
        waiting_.ended(request);
      }
      request.done(result);
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  WaitingRequest waiting_;  // guarded by mutex_
  bool closing_ = false;    // guarded by mutex_
  std::vector<std::thread> threads_;
};

// There is one ring, and one thread that takes completions. At most `depth` requests are in the
// ring and all others wait in a queue, so the completion queue cannot overflow.
class UringIo final : public BlockIo {
 public:
  static std::unique_ptr<BlockIo> make(int depth) {
    auto io = std::unique_ptr<UringIo>(new UringIo(depth));
    if (io_uring_queue_init(static_cast<unsigned>(depth), &io->ring_, 0) != 0) return nullptr;
    io->thread_ = std::thread([raw = io.get()] { raw->run(); });
    return io;
  }
  ~UringIo() override {
    if (!thread_.joinable()) return;
    {
      const std::lock_guard lock(mutex_);
      closing_ = true;
      push_nothing();
    }
    thread_.join();
    io_uring_queue_exit(&ring_);
  }
  void submit(BlockRequest request) override {
    const std::lock_guard lock(mutex_);
    waiting_.push(std::move(request));
    fill();
  }
  const char* name() const override { return "io_uring"; }

 private:
  explicit UringIo(int depth) : depth_(depth) {}

  void fill() {  // requires mutex_
    while (!waiting_.empty() && waiting_.num_taken() < depth_) {
      io_uring_sqe* entry = io_uring_get_sqe(&ring_);
      if (entry == nullptr) break;
      auto* request = new BlockRequest(waiting_.take());  // run() deletes it
      const auto bytes = static_cast<unsigned>(request->bytes);
      const auto offset = static_cast<uint64_t>(request->offset);
      if (request->write) {
        io_uring_prep_write(entry, request->file, request->data, bytes, offset);
      } else {
        io_uring_prep_read(entry, request->file, request->data, bytes, offset);
      }
      io_uring_sqe_set_data(entry, request);
    }
    push();
  }

  void push() {  // requires mutex_; the kernel may lack memory or accept only a part
    while (io_uring_sq_ready(&ring_) > 0) {
      if (io_uring_submit(&ring_) < 0) std::this_thread::yield();
    }
  }

  void push_nothing() {  // requires mutex_; wakes run()
    io_uring_sqe* entry = io_uring_get_sqe(&ring_);
    if (entry == nullptr) return;  // the ring is full, so run() wakes anyway
    io_uring_prep_nop(entry);
    io_uring_sqe_set_data(entry, nullptr);
    push();
  }

  void run() {
    while (true) {
      io_uring_cqe* entry = nullptr;
      if (io_uring_wait_cqe(&ring_, &entry) != 0) continue;  // interrupted
      const std::unique_ptr<BlockRequest> request(
          static_cast<BlockRequest*>(io_uring_cqe_get_data(entry)));
      const int64_t result = entry->res;
      io_uring_cqe_seen(&ring_, entry);
      {
        const std::lock_guard lock(mutex_);
        if (request) {
          waiting_.ended(*request);
          fill();
        }
      }
      // submit() wrote the request under the lock, so the object is complete here. After a partial
      // transfer, done() may submit the remaining part.
      if (request) request->done(result);
      const std::lock_guard lock(mutex_);
      if (closing_ && waiting_.num_taken() == 0 && waiting_.empty()) return;
    }
  }

  const int depth_;
  io_uring ring_{};
  std::mutex mutex_;
  WaitingRequest waiting_;  // guarded by mutex_
  bool closing_ = false;    // guarded by mutex_
  std::thread thread_;
};

}  // namespace

std::unique_ptr<BlockIo> BlockIo::uring(int depth) { return UringIo::make(depth); }

std::unique_ptr<BlockIo> BlockIo::threads(int num_threads) {
  return std::make_unique<ThreadIo>(num_threads);
}

std::unique_ptr<BlockIo> BlockIo::best(int depth) {
  constexpr int kThreads = 4;
  std::unique_ptr<BlockIo> io = uring(depth);
  return io ? std::move(io) : threads(kThreads);
}

}  // namespace penstock::mem
