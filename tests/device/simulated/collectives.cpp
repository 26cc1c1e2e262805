#include "tests/device/simulated/collectives.h"

#include <ATen/core/ivalue.h>
#include <ATen/ops/tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <thread>

#include "tests/device/simulated/arena.h"
#include "tests/device/simulated/control.h"
#include "tests/device/simulated/counting.h"
#include "tests/device/simulated/launches.h"
#include "tests/device/simulated/stream.h"
#include "tests/device/simulated/view.h"

namespace penstock::sim {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using WorkPointer = c10::intrusive_ptr<c10d::Work>;
using Timeout = std::chrono::milliseconds;

constexpr std::chrono::milliseconds kLook{10};  // between two checks for a failed device
constexpr std::chrono::seconds kMostAbort{60};  // how long an abort waits for other communicators

// Returns the number of collectives that a device runs now.
std::atomic<int>& running(int device) {
  static std::array<std::atomic<int>, kDevices> counts{};
  return counts.at(static_cast<size_t>(device));
}

// Keeps a collective's tensors alive until a caller waits for the collective or it is done, because
// the allocator does not know of the use on the backend's stream. The work and the backend share
// the list, because either may be destroyed first.
using Stash = std::shared_ptr<Tensors>;

class CollectiveWork final : public c10d::Work {
 public:
  CollectiveWork(int rank, c10d::OpType type, MarkPointer mark, c10::Device device, Stash stash)
      : Work(rank, type), mark_(std::move(mark)), device_(device), stash_(std::move(stash)) {}

  bool isCompleted() override { return is_done(mark_); }
  bool isSuccess() const override { return true; }
  bool wait(Timeout timeout) override {
    if (timeout == kNoTimeout) {
      synchronize();
    } else {
      wait_on_host("collective");
    }
    return true;
  }
  void synchronize() override {
    if (opType_ == c10d::OpType::BARRIER) return wait_on_host("barrier");
    block(current_stream(device_.index()), mark_);
    stash_->clear();
  }
  void blockCurrentStream() override { synchronize(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

  // The future is already completed, as NCCL's is: a wait for it blocks only the caller's stream.
  void set_future(c10::Stream stream) {
    const c10::StreamGuard guard(stream);
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device_});
    future_->markCompleted(at::IValue(*stash_));
  }

 private:
  void wait_on_host(const char* why) {
    sim::synchronize(device_.index(), mark_, why);
    stash_->clear();
  }

  const MarkPointer mark_;
  const c10::Device device_;
  const Stash stash_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

size_t bytes_of(const Tensors& tensors) {
  size_t bytes = 0;
  for (const Tensor& tensor : tensors) bytes += tensor.nbytes();
  return bytes;
}

Tensors joined(Tensors first, const Tensors& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

Tensors flat(const std::vector<Tensors>& lists) {
  Tensors all;
  for (const Tensors& list : lists) all = joined(std::move(all), list);
  return all;
}

// Views of the outputs or the inputs for the inner backend. They hold no reference to the tensors.
class Views {
 public:
  explicit Views(const Tensors& tensors) {
    for (const Tensor& tensor : tensors) {
      TORCH_CHECK(on_device(tensor), "[sim] simccl: expected a device tensor, got one on ",
                  tensor.device());
      TORCH_CHECK(tensor.is_contiguous(), "[sim] simccl: expected a contiguous tensor");
      views_.emplace_back(tensor);
    }
  }
  Tensors tensors() const {
    Tensors all;
    for (const View& view : views_) all.push_back(view.on_shadow());
    return all;
  }
  // At most one list, as one thread has one device.
  std::vector<Tensors> lists() const {
    return views_.empty() ? std::vector<Tensors>{} : std::vector<Tensors>{tensors()};
  }

 private:
  std::vector<View> views_;
};

// The description of a collective when it is issued.
struct Issue {
  c10d::OpType type;
  const char* name;
  Tensors tensors;
  size_t bytes;
  bool alike;         // whether every rank of the group calls it with the same number of bytes
  bool async = true;  // c10d's asyncOp
};

Issue issue(c10d::OpType type, const char* name, const Tensors& outputs, const Tensors& inputs = {},
            bool async = true) {
  const bool alike = type == c10d::OpType::_ALLGATHER_BASE ||
                     type == c10d::OpType::_REDUCE_SCATTER_BASE ||
                     type == c10d::OpType::ALLREDUCE || type == c10d::OpType::BROADCAST ||
                     type == c10d::OpType::ALLTOALL_BASE;
  return {type,  name, joined(outputs, inputs), std::max(bytes_of(outputs), bytes_of(inputs)),
          alike, async};
}

LaunchBook& launches() {
  static auto* const book = new LaunchBook;
  return *book;
}

std::atomic<void (*)()> issue_hook{nullptr};
std::atomic<int64_t> issue_delay_us{0};

void sleep_before_issue() {
  const int64_t high = issue_delay_us;
  if (high == 0) return;
  thread_local std::minstd_rand random{std::random_device()()};
  std::uniform_int_distribution<int64_t> draw(0, high);
  std::this_thread::sleep_for(std::chrono::microseconds(draw(random)));
}

// The part of the backend without the collectives: order, streams, lifetime. Only one thread uses
// it at a time.
class StreamBackend : public c10d::Backend {
 public:
  StreamBackend(int rank, int size, MakeInner make)
      : Backend(rank, size), core_(std::make_shared<Core>(size, std::move(make))) {}
  ~StreamBackend() override { finish(); }

  const std::string getBackendName() const override { return "simccl"; }
  void setTimeout(Timeout /*timeout*/) override {}
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return c10::make_intrusive<Options>(getBackendName());
  }
  // Abandons the collectives that have begun and starts no others. Like NCCL, it does not end a
  // connection in progress.
  void abort() override { core_->abort(); }
  // Waits for the other ranks, as NCCL does while it takes communicators apart.
  void shutdown() override {
    finish();
    if (!core_->aborted) core_->part();  // the inner backend ends with this object
  }
  void eagerConnectSingleDevice(at::Device device) override { core_->connect(device.index()); }

  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { group_.emplace(); }
  WorkPointer endCoalescing() override {
    TORCH_CHECK(group_, "[sim] simccl: no group of collectives was started");
    Group group = *std::exchange(group_, std::nullopt);
    return launch({c10d::OpType::COALESCED, "coalesced", group.tensors, group.bytes, group.alike,
                   group.async},
                  [calls = std::move(group.calls)](Backend& inner) {
                    std::vector<WorkPointer> works;
                    for (const auto& call : calls) works.push_back(call(inner));
                    return works;
                  });
  }

 protected:
  using Call = std::function<WorkPointer(Backend& inner)>;  // runs on the stream

  WorkPointer run(const Issue& issue, Call call) {
    if (!group_) {
      return launch(issue, [call = std::move(call)](Backend& inner) {
        return std::vector<WorkPointer>{call(inner)};
      });
    }
    group_->calls.push_back(std::move(call));
    group_->tensors = joined(std::move(group_->tensors), issue.tensors);
    group_->bytes += issue.bytes;
    group_->alike = group_->alike && issue.alike;
    group_->async = group_->async || issue.async;
    return nullptr;
  }

  bool is_grouping() const { return group_.has_value(); }

 private:
  // Shared with queued work, which may outlive the backend after an abort.
  struct Core : std::enable_shared_from_this<Core> {
    Core(int ranks, MakeInner make) : size(ranks), make_inner(std::move(make)) {}
    // The inner backend's destructor waits for its collectives, which may never end without the
    // peers.
    ~Core() {
      close();
      if (aborted) std::thread([given_up = std::move(inner)] {}).detach();
    }

    // Connects the ranks on their devices, at the first collective at the latest. The calling
    // thread blocks until all ranks have come.
    Identity connect(int device) {
      const std::lock_guard lock(connecting);
      if (aborted) return {};
      const auto found = identities.find(device);
      if (found != identities.end()) return found->second;
      if (!inner) inner = make_inner();
      static const auto kProcess = static_cast<int64_t>(std::random_device()());
      std::vector<Tensors> came{Tensors()};
      for (int rank = 0; rank < size; ++rank) {
        came[0].push_back(at::empty({2}, at::kLong));
      }
      Tensors mine{at::tensor({static_cast<int64_t>(device), kProcess}, at::kLong)};
      inner->allgather(came, mine)->wait();
      uint64_t ranks = 0;
      std::map<int64_t, int> by_device;
      for (int rank = 0; rank < size; ++rank) {
        const auto index = came[0][rank][0].item<int64_t>();
        const auto [other, is_new] = by_device.emplace(index, rank);
        TORCH_CHECK_WITH(DistBackendError, is_new, "[sim] simccl: ranks ", other->second, " and ",
                         rank, " are on the same device ", index);
        ranks = c10::hash_combine(ranks, static_cast<size_t>(index));
        ranks = c10::hash_combine(ranks, static_cast<size_t>(came[0][rank][1].item<int64_t>()));
      }
      return identities.emplace(device, launches().connected(ranks, device)).first->second;
    }

    void close() {
      const std::lock_guard lock(connecting);
      for (const auto& [device, identity] : identities) launches().closed(identity, device);
      identities.clear();
    }

    void part() {
      if (identities.empty()) return;
      try {
        inner->barrier()->wait();
      } catch (const std::exception&) {  // a peer's process has ended
      }
      close();
    }

    void abort() {
      std::vector<int> devices;
      {
        const std::lock_guard lock(mutex);
        aborted = true;
        changed.notify_all();
        if (connecting.try_lock()) {  // else a connection is in progress, which this does not end
          const std::lock_guard held(connecting, std::adopt_lock);
          for (const auto& [device, identity] : identities) {
            launches().closed(identity, device);
            devices.push_back(device);
          }
          identities.clear();
        }
      }
      // NCCL frees the communicator's memory, which waits for all kernels on the device.
      const auto deadline = std::chrono::steady_clock::now() + kMostAbort;
      for (const int device : devices) {
        while (running(device) > 0 && std::chrono::steady_clock::now() < deadline) {
          std::this_thread::sleep_for(kLook);
        }
      }
    }

    // Like NCCL's kernels, a collective whose peers are missing or run another collective waits
    // until it is aborted or its device fails. The inner backend's collectives cannot be ended, so
    // a detached thread keeps waiting for them. After that, no other collective may begin, because
    // it would receive the messages that peers send to the abandoned ones.
    void run(int device, uint64_t kind, std::function<std::vector<WorkPointer>(Backend&)> begin) {
      auto ended = std::make_shared<bool>(false);  // guarded by the mutex
      std::thread([self = shared_from_this(), kind, begin = std::move(begin), ended] {
        try {
          if (kind != 0 && !self->agree(kind)) return;
          for (const auto& work : begin(*self->inner)) work->wait();
        } catch (const std::exception&) {
          return;
        }
        const std::lock_guard lock(self->mutex);
        *ended = true;
        self->changed.notify_all();
      }).detach();
      ++running(device);
      std::unique_lock lock(mutex);
      const auto over = [&] { return aborted || *ended || has_failed(device); };
      while (!changed.wait_for(lock, kLook, over)) {
      }
      --running(device);
      if (!*ended) aborted = true;
    }

    // Returns whether all ranks run the same collective. The inner backend would end the process if
    // sizes differed.
    bool agree(uint64_t kind) const {
      const auto mine = static_cast<int64_t>(kind >> 2);
      Tensors range{at::tensor({mine, -mine}, at::kLong)};
      c10d::AllreduceOptions options;
      options.reduceOp = c10d::ReduceOp::MAX;
      inner->allreduce(range, options)->wait();
      return range[0][0].item<int64_t>() == -range[0][1].item<int64_t>();
    }

    const int size;
    const MakeInner make_inner;
    c10::intrusive_ptr<Backend> inner;  // null until the ranks are connected
    std::mutex connecting;
    std::map<int, Identity> identities;  // by device; guarded by `connecting`
    std::mutex mutex;
    std::condition_variable changed;
    std::atomic<bool> aborted{false};  // set under the mutex
  };
  struct Group {
    std::vector<Call> calls;
    Tensors tensors;
    size_t bytes = 0;
    bool alike = true, async = false;
  };
  struct Unfinished {
    MarkPointer mark;
    Stash stash;
  };

  WorkPointer launch(const Issue& issue, std::function<std::vector<WorkPointer>(Backend&)> begin) {
    const c10::Device device =
        issue.tensors.empty() ? sim_device(current_device()) : issue.tensors.front().device();
    sleep_before_issue();
    if (void (*const hook)() = issue_hook) hook();
    const Identity identity = core_->connect(device.index());
    const c10::Stream issuing = current_stream(device.index());
    const c10::Stream stream = issue.async ? stream_of(device) : issuing;
    count_collective(issue.name, issue.bytes);
    if (issue.async) block(stream, record(issuing));
    // A communicator runs one collective after another, whatever streams they are launched on.
    block(stream, std::exchange(last_, nullptr));
    uint64_t kind = 0;
    if (issue.alike) {
      kind = c10::hash_combine(static_cast<size_t>(issue.type), issue.bytes);
      kind = c10::hash_combine(kind, launches().launched(identity, device.index()));
    }
    sim::launch(stream, issue.name, [core = core_, device, kind, begin = std::move(begin)] {
      if (!core->aborted) core->run(device.index(), kind, begin);
    });
    const auto mark = record(stream);
    last_ = mark;
    // Memory of a synchronous collective is freed in the order of the stream that it ran on.
    if (!issue.async) return nullptr;
    auto stash = std::make_shared<Tensors>(issue.tensors);
    auto work = c10::make_intrusive<CollectiveWork>(getRank(), issue.type, mark, device, stash);
    work->set_future(stream);
    remember({mark, std::move(stash)});
    return work;
  }

  c10::Stream stream_of(c10::Device device) {
    const std::lock_guard lock(mutex_);
    const auto found = streams_.find(device.index());
    if (found != streams_.end()) return found->second;
    return streams_.emplace(device.index(), pool_stream(device.index(), true)).first->second;
  }

  // Also destroys finished entries, after the lock is released, because this may free memory.
  void remember(Unfinished one) {
    std::vector<Unfinished> done;
    const std::lock_guard lock(mutex_);
    while (!unfinished_.empty() && is_done(unfinished_.front().mark)) {
      done.push_back(std::move(unfinished_.front()));
      unfinished_.pop_front();
    }
    unfinished_.push_back(std::move(one));
  }

  // Isn't counted: when an engine that was dropped ends is up to Python's collector of garbage and
  // to its peers.
  void finish() {
    if (!core_->aborted) drain(last_);
  }

  const std::shared_ptr<Core> core_;
  std::optional<Group> group_;
  MarkPointer last_;  // the end of the last collective
  std::mutex mutex_;
  std::map<int, c10::Stream> streams_;  // by device; mutex_ guards this and unfinished_
  std::deque<Unfinished> unfinished_;
};

class SimBackend final : public StreamBackend {
 public:
  using StreamBackend::StreamBackend;

  WorkPointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return run(issue(c10d::OpType::BROADCAST, "broadcast", tensors, {}, options.asyncOp),
               [views = Views(tensors), options](Backend& inner) {
                 auto local = views.tensors();
                 return inner.broadcast(local, options);
               });
  }
  WorkPointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return run(issue(c10d::OpType::ALLREDUCE, "all_reduce", tensors, {}, options.asyncOp),
               [views = Views(tensors), options](Backend& inner) {
                 auto local = views.tensors();
                 return inner.allreduce(local, options);
               });
  }
  WorkPointer allreduce_coalesced(Tensors& tensors,
                                  const c10d::AllreduceCoalescedOptions& options) override {
    return run(issue(c10d::OpType::ALLREDUCE_COALESCED, "all_reduce", tensors),
               [views = Views(tensors), options](Backend& inner) {
                 auto local = views.tensors();
                 return inner.allreduce_coalesced(local, options);
               });
  }
  WorkPointer reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return run(issue(c10d::OpType::REDUCE, "reduce", tensors),
               [views = Views(tensors), options](Backend& inner) {
                 auto local = views.tensors();
                 return inner.reduce(local, options);
               });
  }
  WorkPointer _allgather_base(Tensor& output, Tensor& input,
                              const c10d::AllgatherOptions& options) override {
    return run(
        issue(c10d::OpType::_ALLGATHER_BASE, "all_gather", {output}, {input}, options.asyncOp),
        [views = Views({output, input}), options](Backend& inner) {
          auto local = views.tensors();
          return inner._allgather_base(local[0], local[1], options);
        });
  }
  WorkPointer allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                        const c10d::AllgatherOptions& options) override {
    return run(issue(c10d::OpType::ALLGATHER, "all_gather", flat(outputs), inputs),
               [out = Views(flat(outputs)), in = Views(inputs), options](Backend& inner) {
                 auto lists = out.lists();
                 auto local = in.tensors();
                 return inner.allgather(lists, local, options);
               });
  }
  WorkPointer allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                              const c10d::AllgatherOptions& options) override {
    return run_all(outputs, inputs,
                   [&](Tensor& output, Tensor& input) { _allgather_base(output, input, options); });
  }
  WorkPointer _reduce_scatter_base(Tensor& output, Tensor& input,
                                   const c10d::ReduceScatterOptions& options) override {
    return run(issue(c10d::OpType::_REDUCE_SCATTER_BASE, "reduce_scatter", {output}, {input},
                     options.asyncOp),
               [views = Views({output, input}), options](Backend& inner) {
                 auto local = views.tensors();
                 return inner._reduce_scatter_base(local[0], local[1], options);
               });
  }
  WorkPointer reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                             const c10d::ReduceScatterOptions& options) override {
    return run(issue(c10d::OpType::REDUCE_SCATTER, "reduce_scatter", outputs, flat(inputs)),
               [out = Views(outputs), in = Views(flat(inputs)), options](Backend& inner) {
                 auto local = out.tensors();
                 auto lists = in.lists();
                 return inner.reduce_scatter(local, lists, options);
               });
  }
  WorkPointer reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                              const c10d::ReduceScatterOptions& options) override {
    return run_all(outputs, inputs, [&](Tensor& output, Tensor& input) {
      _reduce_scatter_base(output, input, options);
    });
  }
  WorkPointer gather(std::vector<Tensors>& outputs, Tensors& inputs,
                     const c10d::GatherOptions& options) override {
    return run(issue(c10d::OpType::GATHER, "gather", flat(outputs), inputs),
               [out = Views(flat(outputs)), in = Views(inputs), options](Backend& inner) {
                 auto lists = out.lists();
                 auto local = in.tensors();
                 return inner.gather(lists, local, options);
               });
  }
  WorkPointer scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                      const c10d::ScatterOptions& options) override {
    return run(issue(c10d::OpType::SCATTER, "scatter", outputs, flat(inputs)),
               [out = Views(outputs), in = Views(flat(inputs)), options](Backend& inner) {
                 auto local = out.tensors();
                 auto lists = in.lists();
                 return inner.scatter(local, lists, options);
               });
  }
  WorkPointer alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes,
                            std::vector<int64_t>& input_sizes,
                            const c10d::AllToAllOptions& options) override {
    Issue all =
        issue(c10d::OpType::ALLTOALL_BASE, "all_to_all", {output}, {input}, options.asyncOp);
    all.alike = output_sizes.empty() && input_sizes.empty();
    return run(all, [views = Views({output, input}), to = output_sizes, from = input_sizes,
                     options](Backend& inner) mutable {
      auto local = views.tensors();
      return inner.alltoall_base(local[0], local[1], to, from, options);
    });
  }
  WorkPointer alltoall(Tensors& outputs, Tensors& inputs,
                       const c10d::AllToAllOptions& options) override {
    return run(issue(c10d::OpType::ALLTOALL, "all_to_all", outputs, inputs),
               [out = Views(outputs), in = Views(inputs), options](Backend& inner) {
                 auto to = out.tensors(), from = in.tensors();
                 return inner.alltoall(to, from, options);
               });
  }
  WorkPointer send(Tensors& tensors, int to, int tag) override {
    return run(issue(c10d::OpType::SEND, "send", tensors),
               [views = Views(tensors), to, tag](Backend& inner) {
                 auto local = views.tensors();
                 return inner.send(local, to, tag);
               });
  }
  WorkPointer recv(Tensors& tensors, int from, int tag) override {
    return run(issue(c10d::OpType::RECV, "recv", tensors),
               [views = Views(tensors), from, tag](Backend& inner) {
                 auto local = views.tensors();
                 return inner.recv(local, from, tag);
               });
  }
  WorkPointer barrier(const c10d::BarrierOptions& options) override {
    return run(issue(c10d::OpType::BARRIER, "barrier", {}),
               [options](Backend& inner) { return inner.barrier(options); });
  }

 private:
  template <typename Each>
  WorkPointer run_all(Tensors& outputs, Tensors& inputs, const Each& each) {
    const bool grouped = is_grouping();
    if (!grouped) startCoalescing();
    for (size_t i = 0; i < outputs.size(); ++i) each(outputs[i], inputs[i]);
    return grouped ? nullptr : endCoalescing();
  }
};

}  // namespace

void set_issue_hook(void (*hook)()) { issue_hook = hook; }

void set_issue_delay_us(int64_t high) { issue_delay_us = high; }

c10::intrusive_ptr<c10d::Backend> make_collectives(int rank, int size, MakeInner make) {
  return c10::make_intrusive<SimBackend>(rank, size, std::move(make));
}

}  // namespace penstock::sim
