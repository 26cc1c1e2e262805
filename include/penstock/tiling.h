#pragma once
// Tiles: what a module computes with when its weight is split by rows (config key "tiling"). Each
// tile is a unit: gathered, used and released in turn. Docs: docs/training.md, "Large layers".
#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "penstock/core.h"
#include "penstock/export.h"

namespace penstock {

namespace tiles {
class TiledWeights;
}

// As in torch.nn.functional.cross_entropy.
struct CrossEntropyOptions {
  int64_t ignore_index = -100;
  std::string reduction = "mean";  // "mean" "sum" "none"
  double label_smoothing = 0.0;
};

// Added to a linear's output: the parameter, for its gradient, and its values, since the parameter
// itself may be sharded by the time they are needed. Both undefined: none.
struct Bias {
  at::Tensor param, values;
};

// One parameter of the core's model. All calls from the thread that runs the model; where
// parameters are sharded every rank makes them, inside or outside the model's forward. Gradients
// of the weight go to the engine; what is returned has the others. No second derivatives
// (RuntimeFault).
class PENSTOCK_API Tiles {
 public:
  // Throws ConfigError when `param` is not tiled.
  Tiles(const Core& core, const std::string& param);
  // Of the parameters that are tiled.
  static std::vector<std::string> names(const Core& core);
  // Without a core: `loss_tokens` as in the config.
  Tiles(std::shared_ptr<tiles::TiledWeights> weights, const std::string& param,
        int64_t loss_tokens);

  int64_t count() const;
  // input [..., columns], bias [rows] or undefined -> [..., rows]. In fp32 each element is what one
  // product gives as far as the BLAS library does; the input's gradient is summed over tiles in
  // fp32.
  at::Tensor linear(const at::Tensor& input, const Bias& bias) const;
  // ids [...] (integers) -> [..., columns]; bit for bit that of the whole weight. `padding_idx` <
  // 0: none.
  at::Tensor embedding(const at::Tensor& ids, int64_t padding_idx, bool scale_grad_by_freq) const;
  // The loss of logits linear(input, bias) that never exist whole: `loss_tokens` rows and one tile
  // at a time, as a running log-sum-exp (arXiv:1805.02867); backward computes them again. input
  // [tokens, columns], target [tokens] -> [] or [tokens], computed in fp32, of dtype `out`.
  at::Tensor cross_entropy(const at::Tensor& input, const Bias& bias, const at::Tensor& target,
                           const CrossEntropyOptions& options, at::ScalarType out) const;

 private:
  std::shared_ptr<tiles::TiledWeights> weights_;  // keeps the core's state alive
  size_t index_;
  int64_t loss_tokens_;
};

}  // namespace penstock
