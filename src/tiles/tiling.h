#pragma once
// Tiles: operators for a module whose weight is split by rows (config key "tiling"). Each tile is a
// unit; the tiles are gathered, used and released in turn. See docs/training.md, "Large layers".
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

// Options of torch.nn.functional.cross_entropy.
struct CrossEntropyOptions {
  int64_t ignore_index = -100;
  std::string reduction = "mean";  // "mean" "sum" "none"
  double label_smoothing = 0.0;
};

// The bias of a linear. `param` gets the gradient. `values` are kept separately, because the
// parameter may be sharded again when the values are needed. Without a bias, both are undefined.
struct Bias {
  at::Tensor param, values;
};

// One tiled parameter of the core's model. All calls come from the model's thread. If parameters
// are sharded, every rank makes the same calls, inside or outside the model's forward. The engine
// takes the gradients of the weight; all other gradients pass through autograd as usual. Second
// derivatives are not supported (RuntimeFault).
class PENSTOCK_API Tiles {
 public:
  // Throws ConfigError when `param` is not tiled.
  Tiles(const Core& core, const std::string& param);
  // Returns the names of the tiled parameters.
  static std::vector<std::string> names(const Core& core);
  // For use without a core. `loss_tokens` is the value in the config.
  Tiles(std::shared_ptr<tiles::TiledWeights> weights, const std::string& param,
        int64_t loss_tokens);

  int64_t count() const;
  // input [..., columns], bias [rows] or undefined -> [..., rows]. Each fp32 element equals
  // that of one product with the whole weight, if the BLAS library guarantees this equality. The
  // input's gradient is summed over tiles in fp32.
  at::Tensor linear(const at::Tensor& input, const Bias& bias) const;
  // ids [...] (integers) -> [..., columns]; bit-identical to a lookup in the whole weight.
  // `padding_idx` < 0: none.
  at::Tensor embedding(const at::Tensor& ids, int64_t padding_idx, bool scale_grad_by_freq) const;
  // Returns the cross-entropy of the logits linear(input, bias) without storing all logits.
  // Computes the logits of `loss_tokens` tokens and one tile at a time, with a running log-sum-exp
  // (arXiv:1805.02867). Backward computes the logits again. input [tokens, columns], target
  // [tokens] -> [] or [tokens], computed in fp32 and returned in dtype `out`.
  at::Tensor cross_entropy(const at::Tensor& input, const Bias& bias, const at::Tensor& target,
                           const CrossEntropyOptions& options, at::ScalarType out) const;

 private:
  std::shared_ptr<tiles::TiledWeights> weights_;  // keeps the core's state alive
  size_t index_;
  int64_t loss_tokens_;
};

}  // namespace penstock
