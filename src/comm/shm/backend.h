#pragma once
// ShmBackend: torch's collectives over a ShmFabric. Any thread may call the functions that torch
// calls on a back end. Collectives run one after another, in the order of the calls. Point-to-point
// messages run independently of them.
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "src/comm/reduction.h"
#include "src/comm/shm/fabric.h"
#include "src/comm/shm/messages.h"
#include "src/comm/shm/tiled_exchange.h"
#include "src/comm/shm/work_queue.h"

namespace penstock::comm {

// Bytes of this rank's memory that a collective reads or writes.
struct ByteRange {
  char* data = nullptr;
  int64_t bytes = 0;
};

// The collectives themselves. Each call blocks. Only one call may run at a time, and every rank
// must make the calls in the same order.
class ShmCollectives {
 public:
  explicit ShmCollectives(ShmFabric& fabric) : fabric_(fabric) {}

  // Sends this rank's `own` to all ranks. to[i] receives the bytes of rank i.
  void all_gather(const ByteRange& own, const std::vector<ByteRange>& to);
  // Reduces parts[i] over all ranks. Rank i writes the result to its `to`.
  void reduce_scatter(const std::vector<ByteRange>& parts, void* to, const Reduction& reduction,
                      int64_t value_bytes);
  void all_reduce(const ByteRange& values, const Reduction& reduction, int64_t value_bytes);
  // Only the root's `values` are overwritten.
  void reduce(const ByteRange& values, const Reduction& reduction, int64_t value_bytes, int root);
  void broadcast(const ByteRange& values, int root);
  // Sends the bytes of from[i] to rank i. The bytes that rank i sends arrive in to[i]. For this
  // rank, from[i] is copied to to[i].
  void all_to_all(const std::vector<ByteRange>& from, const std::vector<ByteRange>& to);
  void gather(const ByteRange& own, const std::vector<ByteRange>& to, int root);
  void scatter(const std::vector<ByteRange>& from, const ByteRange& to, int root);
  void barrier();

  void set_limit(std::chrono::milliseconds limit) { limit_ = limit; }

 private:
  int rank() const { return fabric_.rank(); }
  int size() const { return fabric_.size(); }
  uint32_t next_tag();
  void exchange(const std::vector<Piece>& sends, const std::vector<Piece>& receives);
  // Reduces the received tiles and this rank's `own` in rank order, and writes the result to `to`.
  void reduce_tiles(const std::vector<Piece>& sends, const ByteRange& own, void* to,
                    const Reduction& reduction, int64_t value_bytes);
  void all_reduce_small(const ByteRange& values, const Reduction& reduction, int64_t value_bytes);

  ShmFabric& fabric_;
  ShmTiles tiles_;
  uint32_t sequence_ = 0;
  std::chrono::milliseconds limit_{};
  std::vector<char> small_;
};

// The parts of the back end other than collectives: the queue, point-to-point messages and options.
class ShmEndpoint : public c10d::Backend {
 public:
  // `unlocked` calls its argument without Python's GIL (one_host.h).
  using Unlocked = std::function<void(const std::function<void()>&)>;
  ShmEndpoint(std::unique_ptr<ShmFabric> fabric, std::chrono::milliseconds timeout,
              Unlocked unlocked);
  ~ShmEndpoint() override;

  const std::string getBackendName() const override { return "penstock"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override {
    timeout_ = timeout;
    options_->timeout = timeout;
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return num_collectives_; }
  void abort() override { fabric_->end("the process group was aborted"); }
  void shutdown() override { fabric_->end("the process group was shut down"); }

  using Work = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  Work send(Tensors& tensors, int to, int tag) override;
  Work recv(Tensors& tensors, int from, int tag) override;
  Work recvAnysource(Tensors& tensors, int tag) override;

 protected:
  struct How {
    c10d::OpType type = c10d::OpType::UNKNOWN;
    std::chrono::milliseconds timeout{};
    bool async = true;
  };
  // Queues body(). `results` become the results of the work.
  Work queue(const How& how, Tensors results, std::function<void()> body);
  ShmCollectives& collectives() { return collectives_; }
  Reduction reduction(const c10d::ReduceOp& op, const at::Tensor& values) const;

 private:
  Work message(const at::Tensor& tensor, bool out, int peer, int tag);
  std::chrono::milliseconds limit(std::chrono::milliseconds asked) const;

  const c10::intrusive_ptr<Options> options_;
  std::atomic<std::chrono::milliseconds> timeout_;
  std::atomic<uint64_t> num_collectives_ = 0;
  const Unlocked unlocked_;
  std::unique_ptr<ShmFabric> fabric_;
  ShmCollectives collectives_;
  ShmMessages messages_;
  ShmQueue queue_;
};

class ShmBackend final : public ShmEndpoint {
 public:
  using ShmEndpoint::ShmEndpoint;

  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  Work allreduce_coalesced(Tensors& tensors,
                           const c10d::AllreduceCoalescedOptions& options) override;
  Work reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  Work allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::AllgatherOptions& options) override;
  Work _allgather_base(at::Tensor& output, at::Tensor& input,
                       const c10d::AllgatherOptions& options) override;
  Work allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                           const c10d::AllgatherOptions& options) override;
  Work allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                       const c10d::AllgatherOptions& options) override;
  Work gather(std::vector<Tensors>& outputs, Tensors& inputs,
              const c10d::GatherOptions& options) override;
  Work scatter(Tensors& outputs, std::vector<Tensors>& inputs,
               const c10d::ScatterOptions& options) override;
  Work reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                      const c10d::ReduceScatterOptions& options) override;
  Work _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                            const c10d::ReduceScatterOptions& options) override;
  Work reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                       const c10d::ReduceScatterOptions& options) override;
  Work alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                     std::vector<int64_t>& input_sizes,
                     const c10d::AllToAllOptions& options) override;
  Work alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  Work barrier(const c10d::BarrierOptions& options) override;
};

}  // namespace penstock::comm
