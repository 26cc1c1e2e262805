#pragma once
// For tests: the ranks of one operator are threads of this process.
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "src/parallel/tensor_operators.h"

namespace penstock::parallel {

using Tensors = std::vector<at::Tensor>;

// Runs body(peers) on `size` ranks, which are threads, and returns each rank's result. Throws the
// error of the lowest rank that failed.
inline std::vector<Tensors> on_ranks(int size,
                                     const std::function<Tensors(const OperatorPeers&)>& body) {
  auto groups = Group::threads(size, std::chrono::seconds(20));
  std::vector<Tensors> results(size);
  std::vector<std::exception_ptr> errors(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      Members members;
      for (int other = 0; other < size; ++other) members.ranks.push_back(other);
      members.index = rank;
      try {
        results[rank] = body({std::make_shared<Peers>(groups[rank], members)});
      } catch (...) {
        errors[rank] = std::current_exception();
      }
      groups[rank]->close();
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& error : errors)
    if (error) std::rethrow_exception(error);
  return results;
}

inline at::Tensor leaf(const at::Tensor& values) {
  return values.detach().clone().set_requires_grad(true);
}

inline double apart(const at::Tensor& one, const at::Tensor& other) {
  TORCH_CHECK(one.sizes() == other.sizes(), one.sizes(), " beside ", other.sizes());
  return one.to(at::kDouble).sub(other.to(at::kDouble)).abs().max().item<double>();
}

}  // namespace penstock::parallel
