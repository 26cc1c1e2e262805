#include <c10/util/Exception.h>

#include <utility>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "src/comm/contiguous.h"
#include "src/comm/shm/backend.h"
#include "src/comm/shm/one_host.h"
#include "src/comm/shm/rendezvous.h"

namespace penstock::comm {

using c10d::OpType;

ShmEndpoint::ShmEndpoint(std::unique_ptr<ShmFabric> fabric, std::chrono::milliseconds timeout,
                         Unlocked unlocked)
    : Backend(fabric->rank(), fabric->size()),
      options_(c10::make_intrusive<Options>("penstock", timeout)),
      timeout_(timeout),
      unlocked_(std::move(unlocked)),
      fabric_(std::move(fabric)),
      collectives_(*fabric_),
      messages_(*fabric_) {}

// If a thread still waits for a collective or message of this rank, the wait fails with this
// reason.
ShmEndpoint::~ShmEndpoint() {
  fabric_->end("the process group was destroyed");
  const auto close = [this] {
    queue_.close();
    messages_.close();
  };
  if (unlocked_) {
    unlocked_(close);
  } else {
    close();
  }
}

std::chrono::milliseconds ShmEndpoint::limit(std::chrono::milliseconds asked) const {
  return asked == c10d::kUnsetTimeout || asked <= kNoTimeout ? timeout_.load() : asked;
}

Reduction ShmEndpoint::reduction(const c10d::ReduceOp& op, const at::Tensor& values) const {
  return {op, values.scalar_type(), size_};
}

ShmEndpoint::Work ShmEndpoint::queue(const How& how, Tensors results, std::function<void()> body) {
  ++num_collectives_;
  auto work = c10::make_intrusive<ShmWork>(rank_, how.type, std::move(results));
  const auto within = limit(how.timeout);
  // Each collective has its own limit, so the limit is set on the queue's thread.
  queue_.add(
      work,
      [this, within, body = std::move(body)] {
        collectives_.set_limit(within);
        body();
      },
      !how.async);
  return work;
}

ShmEndpoint::Work ShmEndpoint::message(const at::Tensor& tensor, bool out, int peer, int tag) {
  TORCH_CHECK(peer != rank_ && peer < size_ && tag >= 0, "[comm::ShmBackend] rank ", rank_,
              " cannot exchange a message with tag ", tag, " with rank ", peer);
  const Contiguous flat(tensor);
  TORCH_CHECK(out || tensor.is_contiguous(), "[comm::ShmBackend] recv needs a contiguous tensor");
  auto work =
      c10::make_intrusive<ShmWork>(rank_, out ? OpType::SEND : OpType::RECV, Tensors{tensor});
  if (!out) work->set_source(peer);
  messages_.add(work, {out, peer, flat.values(), static_cast<uint32_t>(tag), timeout_.load()});
  return work;
}

ShmEndpoint::Work ShmEndpoint::send(Tensors& tensors, int to, int tag) {
  return message(only(tensors, "send"), true, to, tag);
}

ShmEndpoint::Work ShmEndpoint::recv(Tensors& tensors, int from, int tag) {
  return message(only(tensors, "recv"), false, from, tag);
}

ShmEndpoint::Work ShmEndpoint::recvAnysource(Tensors& tensors, int tag) {
  return message(only(tensors, "recv"), false, -1, tag);
}

}  // namespace penstock::comm

namespace penstock {

c10::intrusive_ptr<c10d::Backend> one_host_back_end(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    std::chrono::milliseconds timeout, std::string* why_not,
    std::function<void(const std::function<void()>&)> unlocked) {
  comm::ShmMeeting met = comm::meet_in_memory(*store, rank, size, timeout);
  if (!met.fabric) {
    *why_not = met.why_not;
    return {};
  }
  return c10::make_intrusive<comm::ShmBackend>(std::move(met.fabric), timeout, std::move(unlocked));
}

}  // namespace penstock
