#include "tests/ranks/thread_ranks.h"

#include <exception>
#include <thread>

#include "penstock/engine.h"

namespace penstock::ranks {

DenseImpl::DenseImpl(int64_t width, c10::Device where) {
  const torch::nn::Linear made(width, width);
  weight = register_parameter("weight", made->weight.detach().to(where));
  bias = register_parameter("bias", made->bias.detach().to(where));
}

torch::Tensor DenseImpl::forward(const torch::Tensor& x) {
  return torch::nn::functional::linear(x, weight, bias);
}

BlockImpl::BlockImpl(c10::Device where) {
  inner = register_module("inner", Dense(kWidth, where));
  frozen = register_module("frozen", Dense(kWidth, where));
  for (auto& p : frozen->parameters()) p.requires_grad_(false);
}

torch::Tensor BlockImpl::forward(const torch::Tensor& x) {
  return unit(*this, [&] { return x + torch::tanh(frozen(torch::tanh(inner(x)))); });
}

NetImpl::NetImpl(c10::Device where) {
  embed = register_parameter("embed", (torch::randn({kWidth, kWidth}) * 0.3).to(where));
  unused = register_parameter("unused", torch::randn({3}).to(where));
  blocks = register_module("blocks", torch::nn::ModuleList());
  for (int i = 0; i < 3; ++i) blocks->push_back(Block(where));
  run_block = [this](int i, const torch::Tensor& x) { return blocks[i]->as<Block>()->forward(x); };
}

torch::Tensor NetImpl::forward(torch::Tensor x) {
  x = x.matmul(embed);
  for (const int i : {0, 1, 2, 1}) x = run_block(i, x);
  return x.matmul(embed.t());  // tied
}

std::shared_ptr<NetImpl> build(c10::Device where) {
  torch::manual_seed(1);
  return std::make_shared<NetImpl>(where);
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
  const c10::Device where = net.embed.device();
  const torch::Tensor x = values_of(rows, 0), y = values_of(rows, 5).to(where);
  const torch::Tensor out = net.forward(x.to(where, net.embed.scalar_type()));
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
