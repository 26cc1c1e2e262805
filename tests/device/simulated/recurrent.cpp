// The fused cells that torch's LSTM and GRU call on every device except the CPU. They are composed
// of the same operators as the CPU's cells, so autograd can differentiate them.
#include <ATen/ops/empty.h>
#include <torch/library.h>

namespace penstock::sim {
namespace {

using at::Tensor;

std::vector<Tensor> gates(const Tensor& values, const std::optional<Tensor>& bias, int64_t count) {
  return (bias && bias->defined() ? values + *bias : values).unsafe_chunk(count, 1);
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input, const Tensor& hidden,
                                             const Tensor& cell,
                                             const std::optional<Tensor>& input_bias,
                                             const std::optional<Tensor>& hidden_bias) {
  const auto from_input = gates(input, input_bias, 4), from_hidden = gates(hidden, hidden_bias, 4);
  const auto gate = [&](int index) { return from_hidden[index] + from_input[index]; };
  const auto next = gate(1).sigmoid() * cell + gate(0).sigmoid() * gate(2).tanh();
  return {gate(3).sigmoid() * next.tanh(), next, at::empty({0}, input.options())};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& input, const Tensor& hidden, const Tensor& state,
                                    const std::optional<Tensor>& input_bias,
                                    const std::optional<Tensor>& hidden_bias) {
  const auto from_input = gates(input, input_bias, 3), from_hidden = gates(hidden, hidden_bias, 3);
  const auto reset = (from_hidden[0] + from_input[0]).sigmoid();
  const auto update = (from_hidden[1] + from_input[1]).sigmoid();
  const auto fresh = (from_input[2] + from_hidden[2] * reset).tanh();
  return {(state - fresh) * update + fresh, at::empty({0}, input.options())};
}

void register_cells(torch::Library& library) {
  library.impl("_thnn_fused_lstm_cell", lstm_cell);
  library.impl("_thnn_fused_gru_cell", gru_cell);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) { register_cells(library); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) { register_cells(library); }

}  // namespace
}  // namespace penstock::sim
