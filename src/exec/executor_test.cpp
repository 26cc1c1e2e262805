// The executor alone: plan lines over fake ranks (threads of this process), a small model without
// modules, and the expected Adam update computed on full tensors. The failures come from a group
// and a disk that fail on purpose.
#include "src/exec/executor.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <filesystem>
#include <functional>
#include <memory>
#include <ostream>
#include <set>
#include <string>
#include <vector>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/comm/on_ranks.h"
#include "src/plan/planner.h"

namespace penstock::exec::executor_test {
namespace {

constexpr int kSteps = 2;

// A parameter of the model, and its state in the reference.
struct Known {
  std::string name;
  int unit = 0;
  std::vector<int64_t> sizes;
  bool trainable = true;
  at::Tensor value{}, first{}, second{};  // the moments
};

std::vector<Known> make_known() {
  std::vector<Known> made = {{"head", 0, {5, 9}},
                             {"a.weight", 1, {12, 31}},
                             {"a.bias", 1, {7}},
                             {"b.weight", 2, {33, 4}},
                             {"b.frozen", 2, {3, 3}, false}};
  int64_t seed = 1;
  for (Known& one : made) {
    one.value = at::arange(1, 1 + c10::multiply_integers(one.sizes), at::kFloat)
                    .mul(static_cast<double>(seed++))
                    .sin()
                    .view(one.sizes);
    one.first = at::zeros_like(one.value);
    one.second = at::zeros_like(one.value);
  }
  return made;
}

// Returns what the backward of a rank leaves for a parameter.
at::Tensor gradient_of(const Known& one, int rank, int step, int micro) {
  const double shift = 1.0 + rank + 10.0 * step + 100.0 * micro;
  return one.value.add(shift).cos();
}

OptimizerConfig adam() {
  OptimizerConfig optimizer;
  optimizer.lr = 0.01;
  optimizer.weight_decay = 0.0;
  return optimizer;
}

// Makes the same step on full tensors.
void step_reference(std::vector<Known>* known, const std::vector<at::Tensor>& gradients, int step) {
  const OptimizerConfig optimizer = adam();
  for (size_t i = 0; i < known->size(); ++i) {
    Known& one = (*known)[i];
    if (!one.trainable) continue;
    const at::Tensor& gradient = gradients[i];
    const auto [b1, b2] = optimizer.betas;
    one.first = one.first * b1 + gradient * (1 - b1);
    one.second = one.second * b2 + gradient * gradient * (1 - b2);
    const at::Tensor mean = one.first / (1 - std::pow(b1, step));
    const at::Tensor root = (one.second / (1 - std::pow(b2, step))).sqrt();
    one.value = one.value - optimizer.lr * mean / (root + optimizer.eps);
  }
}

// One way to place state, on a mesh.
struct Case {
  const char* name;
  const char* strategy;
  TableOptions options{};
  int nodes = 1, local = 2, tensor = 1;
  int chunks = 1;
  int micros = 2;  // backwards per step
};

void PrintTo(const Case& one, std::ostream* to) { *to << one.name; }

Mesh mesh_of(const Case& one) {
  return Mesh::of(
      {{Axis::kNode, one.nodes}, {Axis::kLocal, one.local}, {Axis::kTensor, one.tensor}});
}

TableOptions options(Tier optim, Tier params = Tier::kDevice, std::optional<Tier> grads = {}) {
  TableOptions made;
  made.accumulate = true;
  made.optim_tier = optim;
  made.param_tier = params;
  made.grad_tier = grads;
  return made;
}

TableOptions once(TableOptions made) {
  made.accumulate = false;
  return made;
}

TableOptions low(Tier optim, Tier params = Tier::kDevice) {
  TableOptions made = options(optim, params);
  made.precision = Dtype::kBf16;
  return made;
}

std::vector<Case> cases() {
  constexpr Tier kDevice = Tier::kDevice, kHost = Tier::kHost, kDisk = Tier::kDisk;
  return {
      {"ddp", "ddp", options(kDevice)},
      {"ddp_alone", "ddp", options(kDevice), 1, 1},
      {"ddp_tensor", "ddp", options(kDevice), 1, 2, 2},
      {"zero1", "zero1", options(kDevice)},
      {"zero1_bf16", "zero1", low(kDevice)},
      {"zero1_host", "zero1", options(kHost)},
      {"zero1_disk", "zero1", options(kDisk), 1, 2, 1, 3},
      {"zero2", "zero2", options(kDevice), 1, 3},
      {"zero2_nodes", "zero2", options(kDevice), 2, 2},
      {"zero2_bf16_disk", "zero2", low(kDisk)},
      {"zero2_gradients_host", "zero2", options(kDevice, kDevice, kHost)},
      {"zero3", "zero3", options(kDevice)},
      {"zero3_tensor", "zero3", options(kDevice), 1, 2, 2},
      {"zero3_bf16", "zero3", low(kDevice), 2, 2},
      {"zero3_host", "zero3", options(kHost, kHost)},
      {"zero3_disk", "zero3", options(kDisk, kDisk, kDisk), 1, 2, 1, 2},
      {"zero3_bf16_disk", "zero3", low(kDisk, kDisk)},
      {"ddp_bf16_once", "ddp", once(low(kDevice)), 1, 2, 1, 1, 1},
      {"zero2_once", "zero2", once(options(kDevice)), 1, 2, 1, 1, 1},
      {"zero3_bf16_once", "zero3", once(low(kHost, kHost)), 1, 2, 1, 1, 1},
      {"zero3_disk_once", "zero3", once(options(kDisk, kDisk, kDisk)), 1, 2, 1, 2, 1},
      {"hpz", "hpz", options(kDevice), 2, 2},
      {"hpz_bf16", "hpz", low(kHost), 2, 2},
  };
}

// One rank: the executor, and parameters without a module.
class Ranked {
 public:
  using MakeIo = std::function<std::unique_ptr<mem::BlockIo>()>;
  Ranked(const Case& one, Group& group, const MakeIo& make_io = {})
      : mesh_(mesh_of(one)),
        table_(preset(one.strategy, one.options).on(mesh_)),
        rank_(group.rank()),
        micros_(one.micros) {
    std::vector<UnitState> units = lay_out();
    ModelDesc model;
    for (const UnitState& unit : units) {
      UnitDesc& desc = model.units.emplace_back();
      desc.name = unit.name;
      desc.num_chunks = one.chunks;
      for (const Flat& flat : unit.flats) {
        desc.flats.push_back({flat.numel, flat.dtype, flat.trainable, flat.placement});
      }
    }
    assume_order(model, true);
    executor_.emplace(table_, mesh_, group, tiers_, std::move(units));
    if (table_.uses_disk()) {
      mem::DiskOptions disk;
      disk.paths = {std::filesystem::temp_directory_path()};
      disk.make_io = make_io;
      disk.stall_s = 5.0;
      tiers_.disk.emplace(disk);
    }
    executor_->claim(model, 2);
    for (UnitState& unit : executor_->units()) {
      for (Flat& flat : unit.flats) executor_->values().adopt(flat, full_of(flat), "initial");
    }
    executor_->traffic().settle();
    lines_ = executor_->prepare(plan_step(table_, model, mesh_, micros_));
    for (const PlannedStep& line : lines_) {
      for (const Move& move : line.step.moves) kinds.insert(move.kind);
      ops.insert(line.step.op);
    }
  }
  ~Ranked() {
    try {
      executor_->drain(true);
    } catch (const std::exception&) {  // it failed before
    }
    for (UnitState& unit : executor_->units()) {
      for (Flat& flat : unit.flats) flat.detach();
    }
    executor_->units().clear();
    tiers_.close_disk();
  }

  // Runs the plan of one step, in its order.
  void step(int number) {
    int micro = 0;
    begin_update();
    for (const PlannedStep& line : lines_) {
      const Step& step = line.step;
      if (step.op == Op::kMicro) micro = step.micro;
      if (step.op == Op::kNorm) begin_update();
      executor_->run(line);
      if (step.op == Op::kForward && step.mark != Mark::kEnd) compute(step.units.front());
      if (step.op != Op::kBackward) continue;
      if (step.units.front() == 0 && step.mark == Mark::kBegin) {
        executor_->gradients().begin_backward(micro);
      }
      if (step.mark != Mark::kGradient && step.mark != Mark::kEnd) compute(step.units.front());
      if (step.mark != Mark::kBegin && gives_gradient(step.mark)) {
        give(step.units.front(), number, micro);
      }
    }
    executor_->gradients().finish();
    executor_->updates().finish();
    executor_->updates().arrive();
    advance(number);
    ++done_;
  }

  // The parameters on every rank are those of the reference. Returns the largest difference.
  double apart() {
    double most = 0.0;
    for (size_t u = 0; u < executor_->units().size(); ++u) {
      for (size_t f = 0; f < executor_->units()[u].flats.size(); ++f) {
        const at::Tensor is = executor_->values().resting(static_cast<int>(u), static_cast<int>(f));
        const at::Tensor wanted = full_of(executor_->units()[u].flats[f]);
        most = std::max(most, (is - wanted).abs().max().item<double>());
      }
    }
    return most;
  }

  Executor& executor() { return *executor_; }
  std::set<MoveKind> kinds;
  std::set<Op> ops;
  double poison = 0.0;  // added to the gradient of "a.bias" on rank 0

 private:
  std::vector<UnitState> lay_out() {
    std::vector<UnitState> units(3);
    int number = 0;
    for (Known& one : known_) {
      UnitState& unit = units[static_cast<size_t>(one.unit)];
      unit.name = one.unit == 0 ? "the root" : one.name.substr(0, 1);
      ModelPlacement place;
      // Each tensor rank has an addend of the gradient of "b.weight".
      if (mesh_.size(Axis::kTensor) > 1 && one.name == "b.weight") {
        place.on(Axis::kTensor).layout = Layout::kPartial;
      }
      Slot slot;
      slot.name = one.name;
      slot.param = at::empty(one.sizes, at::TensorOptions(scalar()));
      slot.window = slot.param.storage();
      slot.index = slot.number = number++;
      slot.whole = slot.sizes = one.sizes;
      Flat* flat = nullptr;
      for (Flat& other : unit.flats) {
        if (other.trainable == one.trainable && other.placement == place) flat = &other;
      }
      if (flat == nullptr) {
        const auto index = static_cast<int>(unit.flats.size());
        flat = &unit.flats.emplace_back(precision(), one.trainable, place);
        flat->number = index;
      }
      flat->add(slot, unit.name);
    }
    for (UnitState& unit : units) {
      for (Flat& flat : unit.flats) flat.seal(mesh_.data() * flat.placement.num_addends(mesh_));
    }
    return units;
  }

  Dtype precision() const { return table_.at(Role::kParam, Phase::kForward).dtype; }
  at::ScalarType scalar() const { return precision() == Dtype::kBf16 ? at::kBFloat16 : at::kFloat; }
  const Known& known(const Slot& slot) const { return known_[static_cast<size_t>(slot.number)]; }

  at::Tensor full_of(const Flat& flat) const {
    const at::Tensor full = at::zeros({flat.numel}, at::kFloat);
    for (const Slot& slot : flat.slots) {
      full.narrow(0, slot.offset, slot.numel).copy_(known(slot).value.reshape({-1}));
    }
    return full;
  }

  // What user code does in a forward or backward: it reads the parameters of the unit.
  void compute(int unit) {
    executor_->params().require(unit);
    for (const Flat& flat : executor_->units()[static_cast<size_t>(unit)].flats) {
      for (const Slot& slot : flat.slots) {
        const at::Tensor wanted = known(slot).value.to(scalar());
        // After the first update, the last bits may differ from those of the reference.
        const double bound = done_ == 0 ? 0.0 : scalar() == at::kFloat ? 1e-6 : 8e-3;
        EXPECT_LE((slot.param - wanted).abs().max().item<double>(), bound) << slot.name;
      }
    }
  }

  void give(int unit, int step, int micro) {
    UnitState& state = executor_->units()[static_cast<size_t>(unit)];
    const int data = mesh_.coordinate(rank_, Axis::kNode) * mesh_.size(Axis::kLocal) +
                     mesh_.coordinate(rank_, Axis::kLocal);
    for (size_t f = 0; f < state.flats.size(); ++f) {
      if (!state.flats[f].trainable) continue;
      const bool addend = state.flats[f].placement.is_partial(Axis::kTensor);
      for (size_t s = 0; s < state.flats[f].slots.size(); ++s) {
        const Slot& slot = state.flats[f].slots[s];
        at::Tensor gradient = gradient_of(known(slot), data, step, micro);
        if (addend) gradient = gradient / mesh_.size(Axis::kTensor);
        if (rank_ == 0 && slot.name == "a.bias") gradient = gradient + poison;
        if (!executor_->gradients().take(unit, static_cast<int>(f), static_cast<int>(s),
                                         gradient.to(scalar()))) {
          update_bad_ = slot.name;
        }
      }
    }
    executor_->gradients().pack(state);
  }

  void begin_update() {
    Update update;
    update.groups = {adam()};
    update.bad = update_bad_;
    update.say = [] { return std::string("same"); };
    update.hear = [this](const std::vector<std::string>&) { return static_cast<double>(micros_); };
    executor_->updates().begin(std::move(update));
  }

  void advance(int step) {
    std::vector<at::Tensor> gradients;
    for (const Known& one : known_) {
      at::Tensor sum = at::zeros_like(one.value);
      for (int rank = 0; rank < mesh_.data(); ++rank) {
        for (int micro = 0; micro < micros_; ++micro) {
          sum = sum + gradient_of(one, rank, step, micro).to(scalar());
        }
      }
      gradients.push_back(sum / (mesh_.data() * micros_));
    }
    step_reference(&known_, gradients, step);
  }

  const Mesh mesh_;
  const Table table_;
  const int rank_, micros_;
  std::vector<Known> known_ = make_known();
  mem::Tiers tiers_;
  std::optional<Executor> executor_;
  std::vector<PlannedStep> lines_;
  std::string update_bad_;
  int done_ = 0;
};

class ExecutorTest : public testing::TestWithParam<Case> {};

INSTANTIATE_TEST_SUITE_P(Tables, ExecutorTest, testing::ValuesIn(cases()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(ExecutorTest, TwoStepsAreThoseOfAdamOnFullTensors) {
  const Case& one = GetParam();
  const bool low = one.options.precision == Dtype::kBf16;
  const auto errors = comm::on_ranks(mesh_of(one).world(), [&](Group& group) {
    Ranked ranked(one, group);
    for (int step = 1; step <= kSteps; ++step) {
      ranked.step(step);
      EXPECT_LT(ranked.apart(), low ? 8e-3 : 2e-6) << "step " << step << ", rank " << group.rank();
    }
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

TEST(Executor, TheCasesHaveAllKindsOfMovesAndLines) {
  std::set<MoveKind> kinds;
  std::set<Op> ops;
  for (const Case& one : cases()) {
    comm::on_ranks(mesh_of(one).world(), [&](Group& group) {
      Ranked ranked(one, group);
      if (group.rank() > 0) return;
      kinds.insert(ranked.kinds.begin(), ranked.kinds.end());
      ops.insert(ranked.ops.begin(), ranked.ops.end());
    });
  }
  // Only layers make the other kinds of moves (src/parallel).
  for (const MoveKind kind : {MoveKind::kAllGather, MoveKind::kReduceScatter, MoveKind::kAllReduce,
                              MoveKind::kSlice, MoveKind::kCopy, MoveKind::kCast}) {
    EXPECT_TRUE(kinds.contains(kind)) << move_kind_name(kind);
  }
  for (const Op op : {Op::kMicro, Op::kMove, Op::kForward, Op::kBackward, Op::kDrop, Op::kSum,
                      Op::kNorm, Op::kUpdate, Op::kPublish}) {
    EXPECT_TRUE(ops.contains(op)) << static_cast<int>(op);
  }
}

// ---- failures

// A rank whose exchange number `fails_at` (from 0) throws.
class FailingGroup final : public Group {
 public:
  FailingGroup(Group& real, int fails_at) : real_(real), left_(fails_at) {}
  int rank() const override { return real_.rank(); }
  int size() const override { return real_.size(); }
  void exchange(const std::vector<Piece>& sends, const std::vector<Piece>& receives,
                uint32_t tag) override {
    if (left_-- == 0) throw RuntimeFault("the cable was pulled");
    real_.exchange(sends, receives, tag);
  }
  std::string transport() const override { return "failing"; }
  void set_position(Position position) override { real_.set_position(std::move(position)); }
  std::string roll_call(const std::string& error) override { return real_.roll_call(error); }
  std::string last_call(const std::string& fault) override { return real_.last_call(fault); }
  void end_exchanges(const std::string& why) override { real_.end_exchanges(why); }
  void renew() override { real_.renew(); }
  void close() override {}
  int left() const { return left_; }

 private:
  Group& real_;
  std::atomic<int> left_;
};

constexpr int kNever = 1 << 20;

TEST(Executor, AnExchangeThatFailsEndsAllRanksWithItsError) {
  const Case one{"zero3", "zero3", options(Tier::kHost, Tier::kHost)};
  int total = 0;
  comm::on_ranks(2, [&](Group& group) {
    FailingGroup failing(group, kNever);
    Ranked ranked(one, failing);
    ranked.step(1);
    if (group.rank() == 0) total = kNever - failing.left();
  });
  ASSERT_GT(total, 10);
  for (int at = 0; at < total; at += std::max(1, total / 6)) {
    const auto errors = comm::on_ranks(2, [&](Group& group) {
      FailingGroup failing(group, group.rank() == 0 ? at : kNever);
      std::string fault;
      try {
        Ranked ranked(one, failing);
        ranked.step(1);
      } catch (const std::exception& error) {
        fault = error.what();
        group.end_exchanges(fault);
      }
      const std::string first = group.last_call(fault);
      throw RuntimeFault(first);
    });
    for (const std::string& error : errors) {
      EXPECT_NE(error.find("the cable was pulled"), std::string::npos) << at << ": " << error;
    }
  }
}

class FailingIo final : public mem::BlockIo {
 public:
  explicit FailingIo(std::shared_ptr<std::atomic<int>> left) : left_(std::move(left)) {}
  void submit(mem::BlockRequest request) override {
    if (--*left_ < 0) {
      request.done = [done = request.done](int64_t) { done(-EIO); };
    }
    real_->submit(std::move(request));
  }
  const char* name() const override { return "failing"; }

 private:
  std::shared_ptr<std::atomic<int>> left_;
  std::unique_ptr<mem::BlockIo> real_ = mem::BlockIo::threads(1);
};

TEST(Executor, ARequestOfTheDiskThatFailsIsAnErrorWithItsPlace) {
  const Case one{"zero3", "zero3", options(Tier::kDisk, Tier::kDisk, Tier::kDisk), 1, 1};
  const auto run = [&](int fails_at, int* used) {
    const auto left = std::make_shared<std::atomic<int>>(fails_at);
    const auto errors = comm::on_ranks(1, [&](Group& group) {
      Ranked ranked(one, group, [&] { return std::make_unique<FailingIo>(left); });
      ranked.step(1);
      ranked.executor().drain();
    });
    *used = fails_at - *left;
    return errors.front();
  };
  int total = 0;
  ASSERT_EQ(run(kNever, &total), "");
  ASSERT_GT(total, 10);
  for (int at = 0; at < total; at += std::max(1, total / 8)) {
    int used = 0;
    const std::string error = run(at, &used);
    EXPECT_NE(error.find("Input/output error"), std::string::npos) << at << ": " << error;
    EXPECT_NE(error.find("bytes"), std::string::npos) << error;
  }
}

TEST(Executor, GradientsThatAreNotFiniteChangeNothingOnAnyRank) {
  for (const char* strategy : {"ddp", "zero2", "zero3"}) {
    const Case one{strategy, strategy, options(Tier::kDevice)};
    const auto errors = comm::on_ranks(2, [&](Group& group) {
      Ranked ranked(one, group);
      ranked.poison = std::nan("");
      try {
        ranked.step(1);
        ADD_FAILURE() << "must throw";
      } catch (const NonFinite& error) {
        EXPECT_NE(std::string(error.what()).find("a.bias"), std::string::npos) << error.what();
      }
      discard(ranked.executor());
      EXPECT_EQ(ranked.apart(), 0.0);
      ranked.poison = 0.0;
    });
    for (const std::string& error : errors) EXPECT_EQ(error, "");
  }
}

TEST(Executor, LinesThatItCannotExecuteAreErrors) {
  const auto errors = comm::on_ranks(1, [&](Group& group) {
    Ranked ranked({"alone", "zero1", options(Tier::kDevice), 1, 1}, group);
    for (const char* text : {"send u1 act pipeline(+1) #2", "recv u1 act pipeline(-1) #2",
                             "move u1 residual copy(host,device)", "move u1 act all_gather(local)",
                             "move u1 cache cast(bf16)"}) {
      const Plan plan{{parse_step(text)}};
      EXPECT_THROW(ranked.executor().run(ranked.executor().prepare(plan).front()), Bug) << text;
    }
  });
  EXPECT_EQ(errors.front(), "");
}

}  // namespace
}  // namespace penstock::exec::executor_test
