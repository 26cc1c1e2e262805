#include "src/comm/shm/backend.h"

#include <c10/util/Exception.h>

#include <utility>

#include "src/comm/contiguous.h"

namespace penstock::comm {

namespace {

using c10d::OpType;
using Tensors = std::vector<at::Tensor>;

// Each collective below checks its tensors on the calling thread and runs on the queue. The `flat`
// tensors keep the memory alive until the collective has run.
std::vector<Contiguous> flats_of(const Tensors& tensors) {
  std::vector<Contiguous> flats;
  for (const at::Tensor& tensor : tensors) flats.emplace_back(tensor);
  return flats;
}

std::vector<ByteRange> ranges_of(const std::vector<Contiguous>& flats) {
  std::vector<ByteRange> ranges;
  for (const Contiguous& flat : flats) ranges.push_back(flat.range());
  return ranges;
}

// Splits a buffer into `count` parts. `rows` has the number of rows of each part; if it is empty,
// the parts have equal sizes.
std::vector<ByteRange> parts_of(const Contiguous& flat, int count,
                                const std::vector<int64_t>& rows) {
  const ByteRange all = flat.range();
  const at::Tensor& values = flat.values();
  std::vector<ByteRange> parts;
  int64_t at = 0;
  if (rows.empty()) {
    TORCH_CHECK(values.numel() % count == 0, "[comm::ShmBackend] ", values.numel(),
                " values cannot be split into ", count, " equal parts");
    for (int i = 0; i < count; ++i)
      parts.push_back({all.data + i * (all.bytes / count), all.bytes / count});
    return parts;
  }
  TORCH_CHECK(static_cast<int>(rows.size()) == count && values.dim() > 0,
              "[comm::ShmBackend] the split sizes need one entry for each of ", count, " ranks");
  const int64_t row = values.size(0) == 0 ? 0 : all.bytes / values.size(0);
  for (const int64_t num_rows : rows) {
    parts.push_back({all.data + at, num_rows * row});
    at += num_rows * row;
  }
  TORCH_CHECK(at == all.bytes,
              "[comm::ShmBackend] the split sizes do not add up to the rows of the tensor");
  return parts;
}

void check_equal(const std::vector<ByteRange>& to, int64_t bytes, int count) {
  TORCH_CHECK(static_cast<int>(to.size()) == count, "[comm::ShmBackend] ", to.size(),
              " tensors given for ", count, " ranks");
  for (const ByteRange& one : to) {
    TORCH_CHECK(one.bytes == bytes, "[comm::ShmBackend] a tensor has ", one.bytes,
                " bytes; expected: ", bytes);
  }
}

}  // namespace

ShmBackend::Work ShmBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const Contiguous flat(only(tensors, "broadcast"));
  return queue({OpType::BROADCAST, options.timeout, options.asyncOp}, tensors,
               [this, flat, root = static_cast<int>(options.rootRank)] {
                 collectives().broadcast(flat.range(), root);
                 flat.put_back();
               });
}

ShmBackend::Work ShmBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  const Contiguous flat(only(tensors, "all_reduce"));
  const Reduction op = reduction(options.reduceOp, flat.values());
  return queue({OpType::ALLREDUCE, options.timeout, options.asyncOp}, tensors, [this, flat, op] {
    collectives().all_reduce(flat.range(), op, flat.value_bytes());
    flat.put_back();
  });
}

ShmBackend::Work ShmBackend::allreduce_coalesced(Tensors& tensors,
                                                 const c10d::AllreduceCoalescedOptions& options) {
  const auto flats = flats_of(tensors);
  std::vector<Reduction> ops;
  for (const Contiguous& flat : flats) ops.push_back(reduction(options.reduceOp, flat.values()));
  return queue({OpType::ALLREDUCE_COALESCED, options.timeout, options.asyncOp}, tensors,
               [this, flats, ops] {
                 for (size_t i = 0; i < flats.size(); ++i) {
                   collectives().all_reduce(flats[i].range(), ops[i], flats[i].value_bytes());
                   flats[i].put_back();
                 }
               });
}

ShmBackend::Work ShmBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const Contiguous flat(only(tensors, "reduce"));
  const Reduction op = reduction(options.reduceOp, flat.values());
  const auto root = static_cast<int>(options.rootRank);
  return queue({OpType::REDUCE, options.timeout, options.asyncOp}, tensors, [this, flat, op, root] {
    collectives().reduce(flat.range(), op, flat.value_bytes(), root);
    if (root == rank_) flat.put_back();
  });
}

ShmBackend::Work ShmBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                       const c10d::AllgatherOptions& options) {
  TORCH_CHECK(outputs.size() == 1, "[comm::ShmBackend] all_gather takes one list of tensors");
  const Contiguous own(only(inputs, "all_gather"));
  const auto to = flats_of(outputs.front());
  check_equal(ranges_of(to), own.range().bytes, size_);
  return queue({OpType::ALLGATHER, options.timeout, options.asyncOp}, outputs.front(),
               [this, own, to] {
                 collectives().all_gather(own.range(), ranges_of(to));
                 for (const Contiguous& one : to) one.put_back();
               });
}

ShmBackend::Work ShmBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                             const c10d::AllgatherOptions& options) {
  Tensors outputs{output}, inputs{input};
  return allgather_into_tensor_coalesced(outputs, inputs, options);
}

ShmBackend::Work ShmBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  const auto to = flats_of(outputs), from = flats_of(inputs);
  TORCH_CHECK(to.size() == from.size(),
              "[comm::ShmBackend] the numbers of inputs and outputs must be equal");
  std::vector<std::vector<ByteRange>> parts;
  for (size_t i = 0; i < to.size(); ++i) {
    parts.push_back(parts_of(to[i], size_, {}));
    check_equal(parts.back(), from[i].range().bytes, size_);
  }
  return queue({OpType::_ALLGATHER_BASE, options.timeout, options.asyncOp}, outputs,
               [this, to, from, parts] {
                 for (size_t i = 0; i < to.size(); ++i) {
                   collectives().all_gather(from[i].range(), parts[i]);
                   to[i].put_back();
                 }
               });
}

// `outputs` has one list of tensors for each rank.
ShmBackend::Work ShmBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                                 const c10d::AllgatherOptions& options) {
  const auto from = flats_of(inputs);
  std::vector<std::vector<Contiguous>> to(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    for (const Tensors& of_rank : outputs) to[i].emplace_back(of_rank.at(i));
    check_equal(ranges_of(to[i]), from[i].range().bytes, size_);
  }
  Tensors results;
  for (const Tensors& of_rank : outputs) {
    results.insert(results.end(), of_rank.begin(), of_rank.end());
  }
  return queue({OpType::ALLGATHER_COALESCED, options.timeout, options.asyncOp}, results,
               [this, from, to] {
                 for (size_t i = 0; i < from.size(); ++i) {
                   collectives().all_gather(from[i].range(), ranges_of(to[i]));
                   for (const Contiguous& one : to[i]) one.put_back();
                 }
               });
}

ShmBackend::Work ShmBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                    const c10d::GatherOptions& options) {
  const Contiguous own(only(inputs, "gather"));
  const auto root = static_cast<int>(options.rootRank);
  const Tensors results = root == rank_ ? outputs.at(0) : Tensors{};
  const auto to = flats_of(results);
  if (root == rank_) check_equal(ranges_of(to), own.range().bytes, size_);
  return queue({OpType::GATHER, options.timeout, options.asyncOp}, results, [this, own, to, root] {
    collectives().gather(own.range(), ranges_of(to), root);
    for (const Contiguous& one : to) one.put_back();
  });
}

ShmBackend::Work ShmBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                     const c10d::ScatterOptions& options) {
  const Contiguous to(only(outputs, "scatter"));
  const auto root = static_cast<int>(options.rootRank);
  const auto from = flats_of(root == rank_ ? inputs.at(0) : Tensors{});
  if (root == rank_) check_equal(ranges_of(from), to.range().bytes, size_);
  return queue({OpType::SCATTER, options.timeout, options.asyncOp}, outputs,
               [this, from, to, root] {
                 collectives().scatter(ranges_of(from), to.range(), root);
                 to.put_back();
               });
}

ShmBackend::Work ShmBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                            const c10d::ReduceScatterOptions& options) {
  TORCH_CHECK(inputs.size() == 1, "[comm::ShmBackend] reduce_scatter takes one list of tensors");
  const Contiguous to(only(outputs, "reduce_scatter"));
  const auto from = flats_of(inputs.front());
  check_equal(ranges_of(from), to.range().bytes, size_);
  const Reduction op = reduction(options.reduceOp, to.values());
  return queue(
      {OpType::REDUCE_SCATTER, options.timeout, options.asyncOp}, outputs, [this, to, from, op] {
        collectives().reduce_scatter(ranges_of(from), to.range().data, op, to.value_bytes());
        to.put_back();
      });
}

ShmBackend::Work ShmBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                  const c10d::ReduceScatterOptions& options) {
  Tensors outputs{output}, inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, options);
}

ShmBackend::Work ShmBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  const auto to = flats_of(outputs), from = flats_of(inputs);
  TORCH_CHECK(to.size() == from.size(),
              "[comm::ShmBackend] the numbers of inputs and outputs must be equal");
  std::vector<std::vector<ByteRange>> parts;
  std::vector<Reduction> ops;
  for (size_t i = 0; i < to.size(); ++i) {
    parts.push_back(parts_of(from[i], size_, {}));
    check_equal(parts.back(), to[i].range().bytes, size_);
    ops.push_back(reduction(options.reduceOp, to[i].values()));
  }
  return queue({OpType::_REDUCE_SCATTER_BASE, options.timeout, options.asyncOp}, outputs,
               [this, to, from, parts, ops] {
                 for (size_t i = 0; i < to.size(); ++i) {
                   collectives().reduce_scatter(parts[i], to[i].range().data, ops[i],
                                                to[i].value_bytes());
                   to[i].put_back();
                 }
               });
}

ShmBackend::Work ShmBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                           std::vector<int64_t>& output_sizes,
                                           std::vector<int64_t>& input_sizes,
                                           const c10d::AllToAllOptions& options) {
  const Contiguous to(output), from(input);
  const auto out = parts_of(from, size_, input_sizes), in = parts_of(to, size_, output_sizes);
  return queue({OpType::ALLTOALL_BASE, options.timeout, options.asyncOp}, {output},
               [this, to, from, out, in] {
                 collectives().all_to_all(out, in);
                 to.put_back();
               });
}

ShmBackend::Work ShmBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                      const c10d::AllToAllOptions& options) {
  const auto to = flats_of(outputs), from = flats_of(inputs);
  TORCH_CHECK(static_cast<int>(to.size()) == size_ && static_cast<int>(from.size()) == size_,
              "[comm::ShmBackend] all_to_all takes a tensor for each of ", size_, " ranks");
  return queue({OpType::ALLTOALL, options.timeout, options.asyncOp}, outputs, [this, to, from] {
    collectives().all_to_all(ranges_of(from), ranges_of(to));
    for (const Contiguous& one : to) one.put_back();
  });
}

ShmBackend::Work ShmBackend::barrier(const c10d::BarrierOptions& options) {
  return queue({OpType::BARRIER, options.timeout, options.asyncOp}, {},
               [this] { collectives().barrier(); });
}

}  // namespace penstock::comm
