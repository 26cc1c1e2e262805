#include "src/parallel/ring_attention.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "src/parallel/thread_ranks.h"

namespace penstock::parallel {
namespace {

struct Row {
  int ranks;
  int64_t batch, heads, key_heads, tokens, size, value_size;
  at::ScalarType type;
  bool masked;
  double limit;
};

at::Tensor random(at::IntArrayRef sizes, const Row& row, int seed) {
  auto generator = at::detail::createCPUGenerator(seed);
  return at::randn(sizes, generator, at::dtype(at::kFloat)).to(row.type);
}

// Returns a rank's part along dim 2, in the order of [Note: Zigzag].
at::Tensor part_of(const at::Tensor& whole, int rank, int ranks) {
  const auto chunks = whole.chunk(2 * ranks, 2);
  return at::cat({chunks[rank], chunks[2 * ranks - 1 - rank]}, 2);
}

// A key mask in which the first tokens of one sequence and some of the others are hidden.
at::Tensor mask_of(const Row& row) {
  at::Tensor mask = at::ones({row.batch, row.tokens}, at::kBool);
  mask[0].narrow(0, 0, 3).fill_(false);
  mask[row.batch - 1].narrow(0, row.tokens / 2, 2).fill_(false);
  return mask;
}

// The output and the three gradients of plain torch, in double precision.
Tensors plain(const Row& row, const Tensors& inputs, const at::Tensor& grad, double scale) {
  Tensors own;
  for (const at::Tensor& one : inputs) own.push_back(leaf(one.to(at::kDouble)));
  at::Tensor visible = at::ones({row.tokens, row.tokens}, at::kBool).tril();
  if (row.masked) visible = visible.logical_and(mask_of(row).unsqueeze(1).unsqueeze(1));
  const int64_t copies = row.heads / row.key_heads;
  const at::Tensor output = at::scaled_dot_product_attention(
      own[0], own[1].repeat_interleave(copies, 1), own[2].repeat_interleave(copies, 1), visible,
      0.0, false, scale);
  output.backward(grad.to(at::kDouble));
  return {output, own[0].grad(), own[1].grad(), own[2].grad()};
}

TEST(RingAttention, EqualsAttentionOverFullSequences) {
  const std::vector<Row> rows = {
      {2, 2, 4, 4, 8, 4, 4, at::kFloat, false, 1e-6},
      {2, 1, 1, 1, 4, 8, 8, at::kFloat, false, 1e-6},  // one head, one token in a chunk
      {3, 2, 4, 2, 24, 8, 8, at::kFloat, false, 1e-6},
      {4, 2, 8, 1, 64, 16, 8, at::kFloat, true, 4e-6},  // values of another size than keys
      {2, 1, 2, 1, 8, 4, 8, at::kFloat, false, 1e-6},
      {4, 3, 6, 3, 48, 4, 4, at::kFloat, true, 1e-6},
      {4, 1, 2, 2, 800, 8, 8, at::kFloat, false, 2e-6},  // several blocks of a fused kernel
      {8, 2, 2, 1, 32, 4, 4, at::kFloat, true, 1e-6},
      {2, 2, 2, 2, 16, 4, 4, at::kDouble, false, 1e-14},
      {2, 2, 2, 2, 16, 4, 4, at::kDouble, true, 1e-14},
      {4, 2, 4, 2, 64, 16, 16, at::kBFloat16, false, 0.04},
      {4, 2, 4, 2, 64, 16, 16, at::kBFloat16, true, 0.04},
  };
  for (size_t i = 0; i < rows.size(); ++i) {
    const Row& row = rows[i];
    const int seed = static_cast<int>(i);
    const Tensors inputs = {
        random({row.batch, row.heads, row.tokens, row.size}, row, 4 * seed),
        random({row.batch, row.key_heads, row.tokens, row.size}, row, 4 * seed + 1),
        random({row.batch, row.key_heads, row.tokens, row.value_size}, row, 4 * seed + 2)};
    const at::Tensor grad =
        random({row.batch, row.heads, row.tokens, row.value_size}, row, 4 * seed + 3);
    const Tensors expected = plain(row, inputs, grad, 0.3);
    const auto results = on_ranks(row.ranks, [&](const OperatorPeers& peers) {
      const at::AutoGradMode records(true);
      const int rank = peers->rank();
      Tensors own;
      for (const at::Tensor& one : inputs) own.push_back(leaf(part_of(one, rank, row.ranks)));
      const auto attended = row.masked ? std::optional(mask_of(row)) : std::nullopt;
      const at::Tensor output = ring_attention(own[0], own[1], own[2], attended, 0.3, peers);
      EXPECT_EQ(output.scalar_type(), row.type);
      output.backward(part_of(grad, rank, row.ranks));
      return Tensors{output, own[0].grad(), own[1].grad(), own[2].grad()};
    });
    for (int rank = 0; rank < row.ranks; ++rank) {
      for (size_t which = 0; which < expected.size(); ++which) {
        EXPECT_LE(apart(results[rank][which], part_of(expected[which], rank, row.ranks)), row.limit)
            << "row " << i << ", rank " << rank << ", tensor " << which;
      }
    }
  }
}

TEST(RingAttention, RefusesWhatDoesNotFit) {
  const at::Tensor odd = at::ones({1, 1, 3, 4}), even = at::ones({1, 1, 4, 4});
  const auto text_of = [](const at::Tensor& query, const at::Tensor& key,
                          const std::optional<at::Tensor>& attended) {
    try {
      on_ranks(2, [&](const OperatorPeers& peers) {
        return std::vector{ring_attention(query, key, key, attended, 1.0, peers)};
      });
    } catch (const c10::Error& error) {
      return std::string(error.what_without_backtrace());
    }
    return std::string();
  };
  EXPECT_NE(text_of(odd, odd, {}).find("do not fit"), std::string::npos);
  EXPECT_NE(text_of(even, odd, {}).find("do not fit"), std::string::npos);
  EXPECT_NE(text_of(even, even.to(at::kDouble), {}).find("do not fit"), std::string::npos);
  EXPECT_NE(text_of(even, even, at::ones({1, 4}, at::kBool)).find("must have [1, 8]"),
            std::string::npos);
}

}  // namespace
}  // namespace penstock::parallel
