#pragma once
// Causal attention over sequences that are divided among the ranks. Keys and values travel around
// the ranks (ring attention, arXiv:2310.01889), so the number of heads does not limit the number of
// ranks, and no rank ever has the keys of a full sequence.
//
// [Note: Zigzag] A sequence is divided into 2 * ranks equal chunks. Rank r has chunk r and chunk
// 2 * ranks - 1 - r, in this order. So every rank computes about the same number of scores,
// although early tokens attend to fewer keys than late ones.
#include <ATen/core/Tensor.h>

#include <optional>

#include "src/parallel/tensor_operators.h"

namespace penstock::parallel {

// query [batch, heads, tokens / ranks, size], key [batch, key heads, tokens / ranks, size], value
// [batch, key heads, tokens / ranks, value size] -> [batch, heads, tokens / ranks, value size],
// contiguous, in the query's dtype. `heads` must be a multiple of `key heads`. The parts are those
// of [Note: Zigzag].
//
// `attended` [batch, tokens] bool: true for each key of the full sequences that may be attended to,
// in token order; absent: all keys. A query without such a key at or before its position gets
// zeros.
//
// Under autocast the arguments are cast as torch's attention casts them. Sums over keys are
// computed in fp32, or in fp64 if the query is fp64. Throws c10::Error if the shapes or
// dtypes do not fit.
at::Tensor ring_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                          const std::optional<at::Tensor>& attended, double scale,
                          const OperatorPeers& peers);

}  // namespace penstock::parallel
