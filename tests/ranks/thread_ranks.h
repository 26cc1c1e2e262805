#pragma once
// Ranks that are threads of one process, and a small model that is awkward on purpose: it has odd
// widths, a parameter that is used twice, frozen parameters in every block, an unused parameter,
// and a block that runs twice.
#include <torch/nn.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "penstock/group.h"

namespace penstock::ranks {

inline constexpr int64_t kWidth = 13;  // odd, so that every shard boundary is inside a parameter
inline constexpr int64_t kRows = 2;    // per rank and micro-batch

// A torch::nn::Linear whose parameters are made on the device `where`.
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

  // Runs a block. Tests may replace it with a function that tells an engine when blocks begin and
  // end.
  std::function<torch::Tensor(int block, const torch::Tensor& x)> run_block;
  torch::Tensor embed, unused;
  torch::nn::ModuleList blocks{nullptr};
};

// Makes a model with the same values every time. Seeds torch's generator, so only one thread at a
// time may call it.
std::shared_ptr<NetImpl> build(c10::Device where = c10::Device(c10::DeviceType::CPU));

// Selects rows from the data of one micro-batch for `world` ranks: the rows of `count` ranks,
// beginning with rank `first`.
struct Rows {
  int step = 0, micro = 0;
  int first = 0, count = 1, world = 1;
};
// Returns the mean loss over those rows, so that the mean over ranks is the loss of all rows.
torch::Tensor loss_of(NetImpl& net, const Rows& rows);

// Runs `work` on one thread per rank. Returns the text of what each rank threw, or "". A rank that
// throws closes its group, which ends the waits of the others.
std::vector<std::string> run_ranks(
    int world, std::chrono::seconds timeout,
    const std::function<void(int rank, const std::shared_ptr<Group>& group)>& work);

}  // namespace penstock::ranks
