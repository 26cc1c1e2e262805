#include "src/comm/device_collectives.h"

#include <utility>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace penstock::comm {

DeviceCollectives::DeviceCollectives(c10::intrusive_ptr<c10d::Backend> back_end)
    : back_end_(std::move(back_end)) {}

DeviceCollectives::~DeviceCollectives() = default;

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

}  // namespace penstock::comm
