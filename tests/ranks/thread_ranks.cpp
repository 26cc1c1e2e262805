#include "tests/ranks/thread_ranks.h"

#include <exception>
#include <thread>

#include "penstock/engine.h"

namespace penstock::ranks {

BlockImpl::BlockImpl() {
  inner = register_module("inner", torch::nn::Linear(kWidth, kWidth));
  frozen = register_module("frozen", torch::nn::Linear(kWidth, kWidth));
  for (auto& p : frozen->parameters()) p.requires_grad_(false);
}

torch::Tensor BlockImpl::forward(const torch::Tensor& x) {
  return unit(*this, [&] { return x + torch::tanh(frozen(torch::tanh(inner(x)))); });
}

NetImpl::NetImpl() {
  embed = register_parameter("embed", torch::randn({kWidth, kWidth}) * 0.3);
  unused = register_parameter("unused", torch::randn({3}));
  blocks = register_module("blocks", torch::nn::ModuleList());
  for (int i = 0; i < 3; ++i) blocks->push_back(Block());
  run_block = [this](int i, const torch::Tensor& x) { return blocks[i]->as<Block>()->forward(x); };
}

torch::Tensor NetImpl::forward(torch::Tensor x) {
  x = x.matmul(embed);
  for (const int i : {0, 1, 2, 1}) x = run_block(i, x);
  return x.matmul(embed.t());  // tied
}

std::shared_ptr<NetImpl> build() {
  torch::manual_seed(1);
  return std::make_shared<NetImpl>();
}

namespace {

torch::Tensor values_of(const Rows& rows, int64_t salt) {
  torch::Generator generator =
      at::detail::createCPUGenerator(1000 * rows.step + 10 * rows.micro + salt);
  return torch::randn({kRows * rows.world, kWidth}, generator)
      .narrow(0, rows.first * kRows, rows.count * kRows);
}

}  // namespace

torch::Tensor loss_of(NetImpl& net, const Rows& rows) {
  const torch::Tensor x = values_of(rows, 0), y = values_of(rows, 5);
  const torch::Tensor out = net.forward(x.to(net.embed.scalar_type()));
  return (out.to(torch::kFloat) - y).square().mean();
}

std::vector<std::string> run_ranks(
    int world, std::chrono::seconds timeout,
    const std::function<void(int rank, const std::shared_ptr<Group>& group)>& work) {
  const std::vector<std::shared_ptr<Group>> groups = Group::threads(world, timeout);
  std::vector<std::string> errors(world);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        work(rank, groups[rank]);
      } catch (const std::exception& error) {
        errors[rank] = error.what();
        groups[rank]->close();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

}  // namespace penstock::ranks
