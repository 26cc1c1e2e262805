#pragma once
// Ranks that are threads of one process, and a small model that is awkward on purpose: odd widths,
// a parameter used twice, a frozen one in every block, one that nothing uses, a block that runs
// twice.
#include <torch/nn.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "penstock/group.h"

namespace penstock::ranks {

inline constexpr int64_t kWidth = 13;  // odd, so that every shard border falls inside a parameter
inline constexpr int64_t kRows = 2;    // per rank and micro-batch

// A torch::nn::Linear whose parameters are made where they are to be.
struct DenseImpl : torch::nn::Module {
  DenseImpl(int64_t width, c10::Device where);
  torch::Tensor forward(const torch::Tensor& x);
  torch::Tensor weight, bias;
};
TORCH_MODULE(Dense);

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(c10::Device where = c10::Device(c10::DeviceType::CPU));
  torch::Tensor forward(const torch::Tensor& x);
  Dense inner{nullptr}, frozen{nullptr};
};
TORCH_MODULE(Block);

struct NetImpl : torch::nn::Module {
  explicit NetImpl(c10::Device where = c10::Device(c10::DeviceType::CPU));
  torch::Tensor forward(torch::Tensor x);

  // Runs a block; may be replaced by one who tells an engine when blocks begin and end.
  std::function<torch::Tensor(int block, const torch::Tensor& x)> run_block;
  torch::Tensor embed, unused;
  torch::nn::ModuleList blocks{nullptr};
};

// The same values every time. Seeds torch's generator, so not on several threads at once.
std::shared_ptr<NetImpl> build(c10::Device where = c10::Device(c10::DeviceType::CPU));

// Which rows of a window's data: those of `count` ranks from `first`, of `world`.
struct Rows {
  int step = 0, micro = 0;
  int first = 0, count = 1, world = 1;
};
// The mean over those rows, so that the mean over ranks is the loss of all rows.
torch::Tensor loss_of(NetImpl& net, const Rows& rows);

// `work` on a thread for each rank; what each of them threw, "" where nothing. A rank that throws
// closes its group, which ends the waits of the others.
std::vector<std::string> run_ranks(
    int world, std::chrono::seconds timeout,
    const std::function<void(int rank, const std::shared_ptr<Group>& group)>& work);

}  // namespace penstock::ranks
