#include "src/engine/step/split_backward.h"

#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "penstock/error.h"

namespace penstock::engine {
namespace {

using Tensors = SplitBackward::Tensors;

// A product whose backward computes both gradients, whatever is needed.
struct Both final : torch::autograd::Function<Both> {
  static inline int runs = 0;
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& weight) {
    context->save_for_backward({x, weight});
    return x * weight;
  }
  static Tensors backward(torch::autograd::AutogradContext* context, const Tensors& gradients) {
    ++runs;
    const Tensors saved = context->get_saved_variables();
    return {gradients[0] * saved[1], gradients[0] * saved[0]};
  }
};

// Named weights, and a stage that computes outputs from an input with them.
struct Stage {
  std::map<std::string, at::Tensor> weights;
  std::function<Tensors(Stage&, const at::Tensor& x)> run;

  at::Tensor& weight(const std::string& name, at::IntArrayRef shape) {
    at::Tensor& made = weights[name];
    if (!made.defined()) {
      made = torch::linspace(-1, 1, c10::multiply_integers(shape)).view(shape).cos();
      made.requires_grad_();
    }
    return made;
  }
  at::Tensor linear(const std::string& name, const at::Tensor& x) {
    return torch::nn::functional::linear(x, weight(name, {6, 6}), weight(name + ".bias", {6}));
  }
};

struct Gradients {
  at::Tensor input;
  std::map<std::string, at::Tensor> weights;
};

at::Tensor given() { return torch::linspace(-2, 2, 24).view({4, 6}).sin(); }

Tensors gradients_of(const Tensors& outputs) {
  Tensors gradients;
  for (const at::Tensor& one : outputs) gradients.push_back(torch::full_like(one, 0.5).cos());
  return gradients;
}

Gradients collect(const Stage& stage, const at::Tensor& input) {
  Gradients found{input.defined() ? input.clone() : input, {}};
  for (const auto& [name, weight] : stage.weights) found.weights[name] = weight.grad();
  return found;
}

Gradients whole(Stage stage) {
  const at::Tensor x = given().requires_grad_();
  const Tensors outputs = stage.run(stage, x * 1);
  torch::autograd::backward(outputs, gradients_of(outputs));
  return collect(stage, x.grad());
}

struct Told {
  int begins = 0;
  std::vector<size_t> groups;
};

// `anchor`: the leaf in place of the received tensor, as the front's Arrive has.
Gradients split(Stage stage, Told* told = nullptr) {
  const at::Tensor x = given().requires_grad_();
  at::Tensor arrived;
  const at::Tensor inner = x * 1;
  inner.register_hook([&](const at::Tensor& gradient) { arrived = gradient; });
  const Tensors outputs = stage.run(stage, inner);
  SplitBackward backward(outputs, gradients_of(outputs), {x});
  backward.inputs();
  for (const auto& [name, weight] : stage.weights) EXPECT_FALSE(weight.grad().defined()) << name;
  EXPECT_FALSE(x.grad().defined());
  Told own;
  backward.weights({[&] { ++own.begins; },
                    [&](const Tensors& leaves, const GraphPlace&) {
                      own.groups.push_back(leaves.size());
                      EXPECT_TRUE(in_backward());
                    },
                    [](const Tensors&) {}});
  if (told != nullptr) *told = own;
  return collect(stage, arrived);
}

void expect_same(const Stage& stage, Told* told = nullptr) {
  const Gradients expected = whole(stage), found = split(stage, told);
  EXPECT_TRUE(found.input.equal(expected.input));
  ASSERT_EQ(found.weights.size(), expected.weights.size());
  for (const auto& [name, gradient] : expected.weights) {
    const at::Tensor& own = found.weights.at(name);
    ASSERT_EQ(own.defined(), gradient.defined()) << name;
    if (!gradient.defined()) continue;
    EXPECT_TRUE(own.allclose(gradient, 1e-6, 1e-7)) << name;
  }
}

TEST(SplitBackward, LayersAndResiduals) {
  Told told;
  expect_same({{},
               [](Stage& own, const at::Tensor& x) -> Tensors {
                 const at::Tensor y = torch::layer_norm(x, {6}, own.weight("norm", {6}),
                                                        own.weight("norm.bias", {6}));
                 const at::Tensor z = own.linear("down", torch::gelu(own.linear("up", y)));
                 return {x + z * own.weight("scale", {6})};
               }},
              &told);
  EXPECT_EQ(told.begins, 1);
  EXPECT_EQ(told.groups, (std::vector<size_t>{1, 2, 2, 2}));  // the weights used last come first
}

TEST(SplitBackward, WeightsUsedTwice) {
  expect_same({{}, [](Stage& own, const at::Tensor& x) -> Tensors {
                 return {own.linear("a", own.linear("b", own.linear("a", x).tanh()).tanh())};
               }});
  // Used twice side by side: no path leads from one use to the other.
  expect_same({{}, [](Stage& own, const at::Tensor& x) -> Tensors {
                 return {own.linear("a", x.tanh()) * own.linear("a", x.sin())};
               }});
}

TEST(SplitBackward, WeightsThatAreComputed) {
  expect_same({{}, [](Stage& own, const at::Tensor& x) -> Tensors {
                 const at::Tensor scale = own.weight("a", {6}) * own.weight("b", {6}).exp();
                 return {x * scale + own.linear("c", x) * scale.sum()};
               }});
}

TEST(SplitBackward, OutputsOffThePath) {
  expect_same({{}, [](Stage& own, const at::Tensor& x) -> Tensors {
                 const at::Tensor table = own.linear("table", torch::ones({4, 6}));
                 return {own.linear("a", x), table, own.weight("free", {6}) * 2};
               }});
  // An output that is an input of another one.
  expect_same({{}, [](Stage& own, const at::Tensor& x) -> Tensors {
                 const at::Tensor table = own.linear("table", torch::ones({4, 6}));
                 const at::Tensor y = own.linear("a", x);
                 return {y, table, y * table};
               }});
}

TEST(SplitBackward, FrozenAndUnusedWeights) {
  expect_same({{}, [](Stage& own, const at::Tensor& x) -> Tensors {
                 own.weight("frozen", {6, 6}).set_requires_grad(false);
                 own.weight("unused", {6});
                 const at::Tensor y = own.linear("frozen", x);
                 return {torch::where(y > 0, own.linear("a", y), y.detach())};
               }});
  expect_same({{}, [](Stage& own, const at::Tensor& x) -> Tensors {
                 own.weight("unused", {6});
                 return {x * 2};
               }});
}

TEST(SplitBackward, ViewsAndEditsInPlace) {
  expect_same({{}, [](Stage& own, const at::Tensor& x) -> Tensors {
                 at::Tensor y = own.linear("a", x) * 1;
                 y.slice(1, 0, 3).mul_(own.weight("edit", {3}));
                 y.relu_();
                 const Tensors parts = own.linear("b", y).chunk(2, 1);
                 return {parts[0] * parts[1].sigmoid()};
               }});
}

TEST(SplitBackward, OperatorsThatAreNotTorchsRunOnce) {
  const Stage stage{{}, [](Stage& own, const at::Tensor& x) -> Tensors {
                      return {Both::apply(own.linear("a", x), own.weight("own", {6}))};
                    }};
  expect_same(stage);
  Both::runs = 0;
  split(stage);
  EXPECT_EQ(Both::runs, 1);
}

TEST(SplitBackward, HooksRunOnce) {
  int on_values = 0, on_weight = 0;
  const Stage stage{{}, [&](Stage& own, const at::Tensor& x) -> Tensors {
                      const at::Tensor y = own.linear("a", x);
                      y.register_hook([&](const at::Tensor& gradient) {
                        ++on_values;
                        return gradient * 3;
                      });
                      own.weight("b", {6, 6}).register_hook([&](const at::Tensor& gradient) {
                        ++on_weight;
                        return gradient * 5;
                      });
                      return {own.linear("b", y)};
                    }};
  expect_same(stage);
  EXPECT_EQ(on_values, 2);  // one of whole(), one of split()
  EXPECT_EQ(on_weight, 2);
}

TEST(SplitBackward, RefusesAHookThatWouldRunTwice) {
  Stage stage{{}, [](Stage& own, const at::Tensor& x) -> Tensors {
                own.weight("a", {6, 6}).register_hook([](const at::Tensor& one) { return one; });
                return {own.linear("a", own.linear("a", x))};
              }};
  EXPECT_THROW(split(stage), RuntimeFault);
}

TEST(SplitBackward, GradientsAddUpOverMicroBatches) {
  Stage stage{{}, [](Stage& own, const at::Tensor& x) -> Tensors {
                return {own.linear("b", own.linear("a", x).tanh())};
              }};
  std::vector<SplitBackward> open;
  std::vector<at::Tensor> inputs;
  for (int micro = 0; micro < 3; ++micro) {
    inputs.push_back((given() + micro).requires_grad_());
    const Tensors outputs = stage.run(stage, inputs.back());
    open.emplace_back(outputs, gradients_of(outputs), Tensors{inputs.back()});
    open.back().inputs();
  }
  for (SplitBackward& one : open)
    one.weights({[] {}, [](const auto&, auto) {}, [](const auto&) {}});
  Stage again = stage;
  for (auto& [name, weight] : again.weights) weight = weight.detach().clone().requires_grad_();
  for (int micro = 0; micro < 3; ++micro) {
    const Tensors outputs = again.run(again, inputs[static_cast<size_t>(micro)].detach());
    torch::autograd::backward(outputs, gradients_of(outputs));
  }
  for (const auto& [name, weight] : again.weights) {
    EXPECT_TRUE(stage.weights.at(name).grad().allclose(weight.grad(), 1e-5, 1e-6)) << name;
  }
}

int num_products = 0;

std::unique_ptr<at::ObserverContext> count_product(const at::RecordFunction& event) {
  if (std::string(event.name()) == "aten::mm") ++num_products;
  return nullptr;
}

TEST(SplitBackward, EachPartComputesOneProduct) {
  Stage stage{{}, [](Stage& own, const at::Tensor& x) -> Tensors {
                return {own.linear("b", own.linear("a", x))};
              }};
  const at::Tensor x = given().requires_grad_();
  const Tensors outputs = stage.run(stage, x);
  SplitBackward backward(outputs, gradients_of(outputs), {x});
  const auto handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback(count_product).scopes({at::RecordScope::FUNCTION}));
  num_products = 0;
  backward.inputs();
  EXPECT_EQ(num_products, 2);
  num_products = 0;
  backward.weights({[] {}, [](const auto&, auto) {}, [](const auto&) {}});
  EXPECT_EQ(num_products, 2);
  at::removeCallback(handle);
}

}  // namespace
}  // namespace penstock::engine
