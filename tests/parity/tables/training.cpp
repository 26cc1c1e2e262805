#include "tests/parity/tables/training.h"

#include <unistd.h>

#include <torch/nn/utils/clip_grad.h>
#include <torch/optim.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <stdexcept>
#include <thread>
#include <utility>

#include "penstock/checkpoint.h"
#include "penstock/config.h"
#include "penstock/report.h"
#include "src/engine/model/values.h"

namespace penstock::tables {

namespace {

constexpr int kSteps = 3;
constexpr double kClip = 0.5;
// A parameter of the root, and one of a block that is used twice.
const std::vector<std::string> kGathered = {"embed", "blocks.1.inner.weight"};

torch::Tensor fp32_copy(const torch::Tensor& tensor) {
  return tensor.detach().to(torch::kCPU, torch::kFloat, /*non_blocking=*/false, /*copy=*/true);
}

Tensors values_of(const ranks::NetImpl& net) {
  Tensors values;
  for (const auto& item : net.named_parameters()) values[item.key()] = fp32_copy(item.value());
  return values;
}

Tensors values_of(const std::vector<std::pair<std::string, torch::Tensor>>& named) {
  Tensors values;
  for (const auto& [name, value] : named) values[name] = fp32_copy(value);
  return values;
}

Tensors gathered_of(const ranks::NetImpl& net) {
  const auto all = net.named_parameters();
  Tensors values;
  for (const std::string& name : kGathered) values[name] = fp32_copy(*all.find(name));
  return values;
}

void shrink(ranks::NetImpl& net) {
  const torch::NoGradGuard no_grad;
  auto all = net.named_parameters();
  for (const std::string& name : kGathered) all.find(name)->mul_(0.875);
}

class Plain final : public Trainer {
 public:
  Plain(const Draw& draw, Dtype dtype)
      : world_(draw.world), accumulate_(draw.loop.accumulate), net_(ranks::build()) {
    masters_ = values_of(*net_);
    net_->to(dtype == Dtype::kFp32 ? torch::kFloat : torch::kBFloat16);
    for (const auto& item : net_->named_parameters())
      if (item.value().requires_grad()) trained_.push_back(masters_.at(item.key()));
    optimizer_ = std::make_unique<torch::optim::AdamW>(
        trained_, torch::optim::AdamWOptions(0.01).eps(1e-4).weight_decay(0.1));
  }

  torch::Tensor forward(int step, int micro) override {
    return ranks::loss_of(*net_, {step, micro, 0, world_, world_});
  }
  double evaluate(int step, int micro) override {
    const torch::NoGradGuard no_grad;
    return forward(step, micro).item<double>();
  }
  void backward(const torch::Tensor& loss, bool again) override {
    loss.backward({}, again);
    for (const auto& item : net_->named_parameters()) {
      torch::Tensor& made = torch::Tensor(item.value()).mutable_grad();
      if (!made.defined()) continue;
      torch::Tensor& sum = masters_.at(item.key()).mutable_grad();
      sum = sum.defined() ? sum + made.to(torch::kFloat) : fp32_copy(made);
      made.reset();
    }
    ++seen_;
  }
  Tensors gradients() override {
    Tensors averages;
    for (const auto& [name, master] : masters_)
      if (master.grad().defined()) averages[name] = master.grad() / divisor();
    return averages;
  }
  bool step(bool force) override {
    if (seen_ < accumulate_ && !force) return false;
    for (const torch::Tensor& master : trained_)
      if (master.grad().defined()) master.mutable_grad().div_(divisor());
    norm_ = torch::nn::utils::clip_grad_norm_(trained_, kClip);
    optimizer_->step();
    optimizer_->zero_grad();
    seen_ = 0;
    const torch::NoGradGuard no_grad;
    for (const auto& item : net_->named_parameters())
      torch::Tensor(item.value()).copy_(masters_.at(item.key()));
    return true;
  }
  double grad_norm() const override { return norm_; }
  Tensors read() override { return gathered_of(*net_); }
  void write() override {
    shrink(*net_);
    for (const std::string& name : kGathered) masters_.at(name).copy_(read().at(name));
  }
  Tensors weights() override {
    Tensors values;
    for (const auto& [name, master] : masters_) values[name] = fp32_copy(master);
    for (const auto& item : net_->named_parameters())
      if (!item.value().requires_grad()) values[item.key()] = fp32_copy(item.value());
    return values;
  }
  void save_and_load(const Loop&) override {}
  Tensors close() override { return values_of(*net_); }

 private:
  // As engine.backward() documents, the gradients of more than `accumulate` backwards add up.
  double divisor() const { return std::min(seen_, accumulate_); }

  const int world_, accumulate_;
  const std::shared_ptr<ranks::NetImpl> net_;
  Tensors masters_;
  std::vector<torch::Tensor> trained_;
  std::unique_ptr<torch::optim::AdamW> optimizer_;
  int seen_ = 0;
  double norm_ = 0;
};

ModelTree tree_of(const ranks::NetImpl& net) {
  ModelTree tree;
  tree.modules.push_back({"", "Net", -1, {}});
  for (size_t i = 0; i < net.blocks->size(); ++i)
    tree.modules.push_back({"blocks." + std::to_string(i), "Block", 0, {}});
  for (const auto& item : net.named_parameters()) {
    for (ModuleInfo& module : tree.modules) {
      const bool root = module.name.empty();
      const bool inside = root ? item.key().find('.') == std::string::npos
                               : item.key().starts_with(module.name + ".");
      if (inside) module.params.push_back(static_cast<int>(tree.params.size()));
    }
    tree.params.push_back({item.key(), item.value()});
  }
  return tree;
}

// Drives the core as a front does, because the C++ front has no calls for half of these loops.
class OnEngine final : public Trainer {
 public:
  OnEngine(const Draw& draw, std::shared_ptr<ranks::NetImpl> net,
           const std::shared_ptr<Group>& group)
      : config_(Config::parse(draw.config())),
        rank_(group->rank()),
        world_(group->size()),
        net_(std::move(net)),
        core_(tree_of(*net_), config_, group) {
    net_->run_block = [this, plain = net_->run_block](int block, const torch::Tensor& x) {
      const int unit = block + 1;
      core_.unit_begin(unit, torch::GradMode::is_enabled());
      torch::Tensor out = plain(block, x);
      core_.unit_end(unit, {out});
      return out;
    };
  }

  torch::Tensor forward(int step, int micro) override {
    core_.unit_begin(0, torch::GradMode::is_enabled());
    torch::Tensor loss = ranks::loss_of(*net_, {step, micro, rank_, 1, world_});
    core_.unit_end(0, {loss});
    return loss;
  }
  double evaluate(int step, int micro) override {
    const torch::NoGradGuard no_grad;
    return forward(step, micro).item<double>();
  }
  void backward(const torch::Tensor& loss, bool again) override {
    loss.backward(core_.start_backward(loss), again);
  }
  Tensors gradients() override { return values_of(values_.full("grad")); }
  bool step(bool force) override {
    return core_.window_complete(force) && core_.step({*config_.optimizer});
  }
  double grad_norm() const override { return Report(core_).grad_norm(); }
  Tensors read() override {
    const std::vector<int> units = values_.units_of(kGathered);
    values_.gather(units, false);
    Tensors values = gathered_of(*net_);
    values_.release(units, /*write=*/false);
    return values;
  }
  void write() override {
    const std::vector<int> units = values_.units_of(kGathered);
    values_.gather(units, true);
    if (rank_ == 0) shrink(*net_);
    values_.release(units, /*write=*/true);
  }
  // Between save and load, runs a window that must leave no trace.
  void save_and_load(const Loop& loop) override {
    Checkpoints checkpoints(core_);
    SaveOptions options;
    options.wait = false;
    // On one rank the window's update changes values before they are written. The other ranks write
    // at once, perhaps before copies from the device have arrived.
    if (rank_ == 0) {
      options.starting = [] { std::this_thread::sleep_for(std::chrono::milliseconds(30)); };
    }
    checkpoints.save(folder_, options);
    for (int micro = 0; micro < loop.accumulate; ++micro) {
      backward(forward(100, micro), false);
    }
    step(false);
    checkpoints.load(folder_);
  }
  Tensors weights() override { return values_of(values_.full("param")); }
  Tensors close() override {
    core_.close(true);
    if (rank_ == 0) std::filesystem::remove_all(folder_);
    return values_of(*net_);
  }

 private:
  const Config config_;
  const std::string folder_ =
      (std::filesystem::temp_directory_path() / ("penstock-tables-" + std::to_string(getpid())))
          .string();
  const int rank_, world_;
  const std::shared_ptr<ranks::NetImpl> net_;
  Core core_;
  Values values_{core_};
};

// Forward and backward of one micro-batch. Returns whether a step followed and was taken.
void run_micro(const Loop& loop, Trainer& trainer, int step, int micro, Trace* trace) {
  const bool first = step == 1 && micro == 0;  // the first window that runs the agreed plan
  const torch::Tensor loss = trainer.forward(step, micro);
  trace->losses.push_back(loss.item<double>());
  if (first && loop.evaluate) trace->losses.push_back(trainer.evaluate(step, micro + 7));
  if (first && loop.read_inside) trace->reads.push_back(trainer.read());
  const bool twice = first && loop.twice;
  trainer.backward(loss, /*again=*/twice);
  if (twice) trainer.backward(loss, /*again=*/false);
}

}  // namespace

Trace train(const Loop& loop, Trainer& trainer) {
  Trace trace;
  for (int step = 0; step < kSteps; ++step) {
    for (int micro = 0; micro < loop.accumulate; ++micro) {
      run_micro(loop, trainer, step, micro, &trace);
      const bool last = micro + 1 == loop.accumulate;
      if (step == 0 && (last || loop.look_early)) trace.gradients.push_back(trainer.gradients());
      const bool force = loop.incomplete && step + 1 == kSteps;
      if (!last && !force) continue;
      if (!trainer.step(force)) throw std::runtime_error("step() was not applied");
      trace.norms.push_back(trainer.grad_norm());
      break;
    }
    if (step == 0 && loop.read) trace.reads.push_back(trainer.read());
    if (step == 1 && loop.write) trainer.write();
    if (step == 1 && loop.save) trainer.save_and_load(loop);
  }
  trace.weights = trainer.weights();
  trace.own = trainer.close();
  return trace;
}

Tensors start_weights() { return values_of(*ranks::build()); }

Trace train_plainly(const Draw& draw, Dtype dtype) {
  Plain plain(draw, dtype);
  return train(draw.loop, plain);
}

std::unique_ptr<Trainer> start_engine(const Draw& draw, std::shared_ptr<ranks::NetImpl> net,
                                      const std::shared_ptr<Group>& group) {
  return std::make_unique<OnEngine>(draw, std::move(net), group);
}

}  // namespace penstock::tables
