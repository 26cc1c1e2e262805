#include "src/parallel/tensor_operators.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "penstock/cut.h"
#include "src/parallel/thread_ranks.h"

namespace penstock::parallel {
namespace {

at::Tensor part(const at::Tensor& whole, int64_t dim, int rank, int size) {
  const int64_t own = whole.size(dim) / size;
  return whole.narrow(dim, rank * own, own);
}

// Returns tensors with the same values and with strides as autograd may pass them: contiguous,
// transposed, and every second column of a wider tensor.
Tensors strided(const at::Tensor& values) {
  const at::Tensor wide = at::randn({values.size(0), 2 * values.size(1)});
  wide.slice(1, 0, 2 * values.size(1), 2).copy_(values);
  return {values, values.t().contiguous().t(), wide.slice(1, 0, 2 * values.size(1), 2)};
}

class Operators : public testing::TestWithParam<int> {
 protected:
  void SetUp() override { at::manual_seed(0); }
  const int size_ = GetParam();
};

// Compares forward and backward with their definitions, for several strides.
TEST_P(Operators, WaysOverTheAxis) {
  const at::Tensor base = at::randn({8, 12}), grad_base = at::randn({8, 12});
  const auto addend = [](const at::Tensor& values, int rank) { return values.mul(rank + 1); };
  const double total = size_ * (size_ + 1) / 2.0;
  for (const at::Tensor& input : strided(base)) {
    for (const at::Tensor& outer : strided(grad_base)) {
      const auto results = on_ranks(size_, [&](const OperatorPeers& peers) -> Tensors {
        const int rank = peers->rank();
        const at::Tensor one = leaf(addend(input, rank));
        at::Tensor made = sum(one, peers);
        made.backward(outer);
        EXPECT_LT(apart(made, base.mul(total)), 1e-4);
        EXPECT_EQ(apart(one.grad(), outer), 0);
        const at::Tensor same = leaf(input);
        made = replicate(same, peers);
        made.backward(addend(outer, rank));
        EXPECT_EQ(apart(made, base), 0);
        EXPECT_LT(apart(same.grad(), grad_base.mul(total)), 1e-4);
        for (const int64_t dim : {0, 1, -1}) {
          const at::Tensor own = leaf(part(input, dim, rank, size_));
          made = gather(own, dim, peers);
          made.backward(addend(outer, rank));
          EXPECT_EQ(apart(made, base), 0);
          EXPECT_LT(apart(own.grad(), part(grad_base.mul(total), dim, rank, size_)), 1e-4);
          const at::Tensor kept = leaf(part(input, dim, rank, size_));
          made = gather_whole(kept, dim, input.size(dim), peers);
          made.backward(outer);
          EXPECT_EQ(apart(made, base), 0);
          EXPECT_EQ(apart(kept.grad(), part(grad_base, dim, rank, size_)), 0);
          const at::Tensor all = leaf(input);
          made = cut(all, dim, peers);
          made.backward(part(outer, dim, rank, size_));
          EXPECT_EQ(apart(made, part(base, dim, rank, size_)), 0);
          EXPECT_EQ(apart(all.grad(), grad_base), 0);
          const at::Tensor some = leaf(addend(input, rank));
          made = sum_and_cut(some, dim, peers);
          made.backward(part(outer, dim, rank, size_));
          EXPECT_LT(apart(made, part(base.mul(total), dim, rank, size_)), 1e-4);
          EXPECT_EQ(apart(some.grad(), grad_base), 0);
          EXPECT_TRUE(made.is_contiguous());
        }
        // 40 values: the shards are not even.
        return {sum(addend(input, rank).narrow(1, 0, 5), peers)};
      });
      for (const Tensors& one : results) EXPECT_TRUE(one[0].equal(results[0][0]));
      EXPECT_LT(apart(results[0][0], base.narrow(1, 0, 5).mul(total)), 1e-4);
    }
  }
}

TEST_P(Operators, SumsOfLowPrecisionAreMadeInFp32) {
  const auto results = on_ranks(size_, [&](const OperatorPeers& peers) -> Tensors {
    // 256 + 1 rounds to 256 in bf16, so a running bf16 sum would not grow.
    const at::Tensor one = at::tensor({peers->rank() == 0 ? 256.0F : 1.0F}).to(at::kBFloat16);
    return {sum(one, peers)};
  });
  const at::Tensor wanted = at::tensor({255.0F + static_cast<float>(size_)}).to(at::kBFloat16);
  for (const Tensors& one : results) EXPECT_TRUE(one[0].equal(wanted));
}

// Two linears with a nonlinearity between them, their biases, and all gradients.
TEST_P(Operators, ColumnThenRow) {
  const at::Tensor x = at::randn({5, 8}), w1 = at::randn({12, 8}), b1 = at::randn({12});
  const at::Tensor w2 = at::randn({8, 12}), b2 = at::randn({8}), outer = at::randn({5, 8});
  Tensors plain = {leaf(x), leaf(w1), leaf(b1), leaf(w2), leaf(b2)};
  const at::Tensor wanted =
      at::linear(at::gelu(at::linear(plain[0], plain[1], plain[2])), plain[3], plain[4]);
  wanted.backward(outer);
  on_ranks(size_, [&](const OperatorPeers& peers) -> Tensors {
    const int rank = peers->rank();
    Tensors own = {leaf(x), leaf(part(w1, 0, rank, size_)), leaf(part(b1, 0, rank, size_)),
                   leaf(part(w2, 1, rank, size_)), leaf(b2)};
    const at::Tensor made =
        row_linear(at::gelu(column_linear(own[0], own[1], own[2], peers)), own[3], own[4], peers);
    made.backward(outer);
    EXPECT_LT(apart(made, wanted), 1e-4);
    EXPECT_LT(apart(own[0].grad(), plain[0].grad()), 1e-4);
    EXPECT_LT(apart(own[1].grad(), part(plain[1].grad(), 0, rank, size_)), 1e-4);
    EXPECT_LT(apart(own[2].grad(), part(plain[2].grad(), 0, rank, size_)), 1e-4);
    EXPECT_LT(apart(own[3].grad(), part(plain[3].grad(), 1, rank, size_)), 1e-4);
    EXPECT_LT(apart(own[4].grad(), plain[4].grad()), 1e-5);
    return {};
  });
}

// `output += residual` in a model: the changed value must keep its gradient.
TEST_P(Operators, OutputsAreChangedInPlace) {
  const at::Tensor x = at::randn({4, 8}), ids = at::arange(8).remainder(4);
  on_ranks(size_, [&](const OperatorPeers& peers) -> Tensors {
    const auto changed = [&](const at::Tensor& input, const at::Tensor& output, double gradient) {
      at::Tensor twice = output;
      twice.mul_(2).add_(1);
      twice.sum().backward();
      EXPECT_LT(apart(input.grad(), at::full_like(input, gradient)), 1e-6);
    };
    const at::Tensor one = leaf(x), weight = leaf(part(x, 0, peers->rank(), size_));
    changed(one, sum(one, peers), 2);
    EXPECT_TRUE(one.equal(x));
    const at::Tensor all = leaf(x), some = leaf(x), row = leaf(part(x, 1, peers->rank(), size_));
    changed(all, gather_whole(all, 0, 4 * size_, peers), 2);
    changed(some, cut(some, 1, peers), 2);
    changed(row, row_linear(row, at::ones({3, 8 / size_}), std::nullopt, peers), 6);
    changed(weight, embedding(ids, weight, 4, -1, peers), 4);  // each row is looked up twice
    return {};
  });
}

TEST_P(Operators, EmbeddingOfAnyVocabulary) {
  for (const int64_t vocabulary : {1, 3, 10, 16}) {
    const at::Tensor ids = at::randn({3, 7}).abs().mul(100).to(at::kLong).remainder(vocabulary);
    const at::Tensor weight = at::randn({vocabulary, 4}), outer = at::randn({3, 7, 4});
    for (const int64_t padding : {int64_t{-1}, vocabulary - 1}) {
      const at::Tensor plain = leaf(weight);
      const at::Tensor wanted = at::embedding(plain, ids, padding);
      wanted.backward(outer);
      on_ranks(size_, [&](const OperatorPeers& peers) -> Tensors {
        const auto [first, end] = share(vocabulary, peers->rank(), peers->size());
        const at::Tensor own = leaf(weight.narrow(0, first, end - first));
        const at::Tensor made = embedding(ids, own, vocabulary, padding, peers);
        made.backward(outer);
        EXPECT_TRUE(made.equal(wanted));
        if (end > first) {
          EXPECT_LT(apart(own.grad(), plain.grad().narrow(0, first, end - first)), 1e-5);
        }
        return {};
      });
    }
  }
  EXPECT_THROW(on_ranks(size_,
                        [&](const OperatorPeers& peers) -> Tensors {
                          const auto [first, end] = share(10, peers->rank(), peers->size());
                          return {embedding(at::tensor({3, 10}), at::randn({end - first, 4}), 10,
                                            -1, peers)};
                        }),
               c10::IndexError);
}

struct LossCase {
  int64_t vocabulary;
  double smoothing;
  bool mean;
  at::ScalarType dtype = at::kFloat;
};

TEST_P(Operators, CrossEntropyOverACutVocabulary) {
  for (const LossCase& one : {LossCase{10, 0, true}, LossCase{10, 0.1, true}, LossCase{3, 0, false},
                              LossCase{17, 0.3, false}, LossCase{16, 0.1, true, at::kBFloat16}}) {
    at::Tensor logits = at::randn({9, one.vocabulary}).mul(5).to(one.dtype);
    const at::Tensor target = at::arange(9).remainder(one.vocabulary);
    target[4] = -100;
    if (one.smoothing == 0) logits[2].slice(0, 0, one.vocabulary - 1).fill_(-INFINITY);
    if (one.smoothing == 0) target[2] = one.vocabulary - 1;
    const at::Tensor plain = leaf(logits.to(at::kFloat));
    const at::Tensor wanted = at::cross_entropy_loss(
        plain, target, {}, one.mean ? at::Reduction::Mean : at::Reduction::Sum, -100,
        one.smoothing);
    wanted.mul(3).backward();
    const double within = one.dtype == at::kFloat ? 1e-5 : 2e-2;
    const auto results = on_ranks(size_, [&](const OperatorPeers& peers) -> Tensors {
      const auto [first, end] = share(one.vocabulary, peers->rank(), peers->size());
      const at::Tensor own = leaf(logits.narrow(1, first, end - first));
      LossOptions options;
      options.label_smoothing = one.smoothing;
      options.mean = one.mean;
      const at::Tensor made = cross_entropy(own, target, one.vocabulary, options, peers);
      made.mul(3).backward();
      EXPECT_LT(apart(made, wanted), 1e-4 * (1 + wanted.abs().item<double>()));
      EXPECT_EQ(own.grad().scalar_type(), one.dtype);
      if (end > first) {
        EXPECT_LT(apart(own.grad(), plain.grad().narrow(1, first, end - first)), within);
      }
      return {made.detach()};
    });
    for (const Tensors& other : results) EXPECT_TRUE(other[0].equal(results[0][0]));
  }
}

TEST_P(Operators, ReplicatedOnceForAllThatReadIt) {
  on_ranks(size_, [&](const OperatorPeers& peers) -> Tensors {
    Replicated last;
    const at::Tensor leaf_value = leaf(at::ones({3}));
    const at::Tensor value = leaf_value.mul(1);
    const at::Tensor one = last.of(value, peers);
    const auto backward = one.grad_fn();
    EXPECT_EQ(last.of(value, peers).grad_fn(), backward);
    {
      const at::NoGradGuard no_grad;
      EXPECT_TRUE(last.of(value, peers).is_same(value));
    }
    EXPECT_EQ(last.of(value, peers).grad_fn(), backward);
    value.add_(1);
    EXPECT_NE(last.of(value, peers).grad_fn(), backward);
    last.of(value, peers).sum().backward();
    EXPECT_EQ(leaf_value.grad()[0].item<double>(), peers->size());
    return {};
  });
}

// A linear layer keeps only a view of its input. Still, all three layers share one sum.
TEST_P(Operators, LayersThatReadOneValueSumItsGradientOnce) {
  const at::Tensor weight = at::randn({5, 4}), input = at::randn({2, 3, 4});
  on_ranks(size_, [&](const OperatorPeers& peers) -> Tensors {
    int sums = 0;
    peers->watch([&](MoveKind kind, const comm::Label&, int64_t) {
      sums += kind == MoveKind::kAllReduce ? 1 : 0;
    });
    Replicated last;
    const at::Tensor leaf_value = leaf(input);
    const at::Tensor value = leaf_value.mul(1);
    at::Tensor total = at::zeros({});
    for (int layer = 1; layer <= 3; ++layer) {
      total = total + layer * at::linear(last.of(value, peers), weight).sum();
    }
    total.backward();
    EXPECT_EQ(sums, peers->size() > 1 ? 1 : 0);
    const at::Tensor expected = (6.0 * peers->size()) * weight.sum(0).expand_as(input);
    EXPECT_TRUE(leaf_value.grad().allclose(expected, 1e-5, 1e-5));
    // The sum is gone after its backward, so a later use makes its own.
    at::linear(last.of(value.detach().requires_grad_(), peers), weight).sum().backward();
    EXPECT_EQ(sums, peers->size() > 1 ? 2 : 0);
    return {};
  });
}

// A layer still sees that its input was changed in place before its backward.
TEST_P(Operators, ChangesInPlaceAreFoundInSharedResults) {
  const at::Tensor weight = at::randn({5, 4}), input = at::randn({2, 4});
  on_ranks(size_, [&](const OperatorPeers& peers) -> Tensors {
    Replicated last;
    const at::Tensor value = leaf(input).mul(1);
    const at::Tensor rows = leaf(weight);
    const at::Tensor first = at::linear(last.of(value, peers), rows);
    const at::Tensor second = at::linear(last.of(value, peers), rows);
    value.add_(1);
    EXPECT_THROW(second.sum().backward(), c10::Error);
    return {};
  });
}

TEST_P(Operators, UnevenSharesAreGathered) {
  for (const int64_t size : {1, 3, 7, 9}) {
    const at::Tensor whole = at::randn({size, 2, 5}), outer = at::randn({size, 2, 5});
    on_ranks(size_, [&](const OperatorPeers& peers) -> Tensors {
      const auto [first, end] = share(size, peers->rank(), peers->size());
      const at::Tensor own = leaf(whole.narrow(0, first, end - first));
      const at::Tensor made = gather_whole(own, 0, size, peers);
      made.backward(outer);
      EXPECT_TRUE(made.equal(whole));
      EXPECT_TRUE(own.grad().equal(outer.narrow(0, first, end - first)));
      const at::Tensor all = leaf(whole);
      const at::Tensor part = cut(all, 0, peers);
      EXPECT_TRUE(part.equal(own));
      return {};
    });
  }
}

TEST_P(Operators, WhatIsWrongIsNamed) {
  const auto told = [&](const std::function<void(const OperatorPeers&)>& body) -> std::string {
    try {
      on_ranks(size_, [&](const OperatorPeers& peers) -> Tensors {
        body(peers);
        return {};
      });
    } catch (const std::exception& error) {
      return error.what();
    }
    return "";
  };
  if (size_ > 1) {
    EXPECT_NE(told([](const OperatorPeers& peers) {
                sum_and_cut(at::randn({7, 2}), 0, peers);
              }).find("size 7 along dim 0 is not divisible by"),
              std::string::npos);
    EXPECT_NE(told([](const OperatorPeers& peers) {
                sum(at::randn({4}).to(at::kDouble), peers);
              }).find("values of Double"),
              std::string::npos);
  }
  EXPECT_NE(told([](const OperatorPeers& peers) {
              embedding(at::tensor({1}), at::randn({99, 2}), 10, -1, peers);
            }).find("of 10 rows, but the weight has 99"),
            std::string::npos);
  EXPECT_NE(told([](const OperatorPeers& peers) {
              const auto [first, end] = share(10, peers->rank(), peers->size());
              cross_entropy(at::randn({1, end - first}), at::tensor({10}), 10, {}, peers);
            }).find("Target is out of bounds"),
            std::string::npos);
  EXPECT_NE(told([](const OperatorPeers& peers) {
              const at::Tensor x = leaf(at::randn({4}));
              sum(x, peers).sum().backward({}, /*retain_graph=*/true, /*create_graph=*/true);
            }).find("no second derivative"),
            std::string::npos);
}

INSTANTIATE_TEST_SUITE_P(OperatorPeers, Operators, testing::Values(1, 2, 4));

}  // namespace
}  // namespace penstock::parallel
