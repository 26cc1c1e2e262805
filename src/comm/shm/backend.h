#pragma once
// ShmBackend: collectives of torch over a ShmFabric. What torch asks of a back end, from any
// thread; collectives run one after the other in the order of the calls, point-to-point messages
// beside them.
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

// What a collective moves, in this rank's memory.
struct ByteRange {
  char* data = nullptr;
  int64_t bytes = 0;
};

// The collectives themselves: blocking, one at a time, the same order on every rank.
class ShmCollectives {
 public:
  explicit ShmCollectives(ShmFabric& fabric) : fabric_(fabric) {}

  // Each rank's `own` goes to `to[rank]` everywhere.
  void all_gather(const ByteRange& own, const std::vector<ByteRange>& to);
  // parts[rank] of everyone, reduced, goes to that rank's `to`.
  void reduce_scatter(const std::vector<ByteRange>& parts, void* to, const Reduction& reduction,
                      int64_t value_bytes);
  void all_reduce(const ByteRange& values, const Reduction& reduction, int64_t value_bytes);
  // `to` is only the root's.
  void reduce(const ByteRange& values, const Reduction& reduction, int64_t value_bytes, int root);
  void broadcast(const ByteRange& values, int root);
  // from[rank] goes there, to[rank] comes from there; this rank's own is copied.
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
  // What `sources` hands over part by part, with this rank's `own` among it, goes to `to`.
  void reduce_tiles(const std::vector<Piece>& sends, const ByteRange& own, void* to,
                    const Reduction& reduction, int64_t value_bytes);
  void all_reduce_small(const ByteRange& values, const Reduction& reduction, int64_t value_bytes);

  ShmFabric& fabric_;
  ShmTiles tiles_;
  uint32_t sequence_ = 0;
  std::chrono::milliseconds limit_{};
  std::vector<char> small_;
};

// All but the collectives.
class ShmEndpoint : public c10d::Backend {
 public:
  // `unlocked`: penstock/one_host.h.
  using Unlocked = std::function<void(const std::function<void()>&)>;
  ShmEndpoint(std::unique_ptr<ShmFabric> fabric, std::chrono::milliseconds timeout,
              Unlocked unlocked);
  ~ShmEndpoint() override;

  const std::string getBackendName() const override { return "penstock"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }
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
  // body() on the queue; `results` are the work's.
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
