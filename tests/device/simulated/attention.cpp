// Scaled dot product attention: runs the CPU's own flash kernel, so the result has the same bits as
// on the CPU.
#include <ATen/SDPBackend.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

namespace penstock::sim {
namespace {

using at::Tensor;
using torch::jit::Stack;

constexpr auto choose = [](const Tensor& query, const Tensor&, const Tensor&,
                           const std::optional<Tensor>& mask, double dropout, bool,
                           std::optional<double>, bool) -> int64_t {
  const bool flash = dropout == 0 && query.dim() == 4 && !(mask && mask->requires_grad());
  return static_cast<int64_t>(flash ? at::SDPBackend::overrideable : at::SDPBackend::math);
};

// Arguments: query, key, value, bias, dropout, causal, return_debug_mask, scale.
void forward(const c10::OperatorHandle& handle, Stack* stack) {
  const Stack in = torch::jit::pop(*stack, handle.schema().arguments().size());
  const auto query = in[0].toTensor(), key = in[1].toTensor();
  auto [output, log_sum] = at::_scaled_dot_product_flash_attention_for_cpu(
      query, key, in[2].toTensor(), in[4].toDouble(), in[5].toBool(), in[3].toOptional<Tensor>(),
      in[7].toOptional<double>());
  const auto unused = at::empty({}, query.options().dtype(at::kLong));
  torch::jit::push(*stack, output, log_sum, Tensor(), Tensor(), query.size(2), key.size(2), unused,
                   unused, Tensor());
}

// Arguments: grad, query, key, value, bias, wanted, output, log_sum, cumulative and largest lengths
// of queries and keys, dropout, causal, seed, offset, scale.
void backward(const c10::OperatorHandle& handle, Stack* stack) {
  const Stack in = torch::jit::pop(*stack, handle.schema().arguments().size());
  const auto bias = in[4].toTensor();
  auto [query, key, value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      in[0].toTensor(), in[1].toTensor(), in[2].toTensor(), in[3].toTensor(), in[6].toTensor(),
      in[7].toTensor(), in[12].toDouble(), in[13].toBool(),
      bias.defined() ? std::optional(bias) : std::nullopt, in[16].toOptional<double>());
  torch::jit::push(*stack, query, key, value, Tensor());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("_fused_sdp_choice", choose);
  const std::string attention = "_scaled_dot_product_fused_attention_overrideable";
  library.impl(attention.c_str(), torch::CppFunction::makeFromBoxedFunction<&forward>());
  library.impl((attention + "_backward").c_str(),
               torch::CppFunction::makeFromBoxedFunction<&backward>());
}

}  // namespace
}  // namespace penstock::sim

// scaled_dot_product_attention calls this stub to choose a kernel, in addition to the operator.
namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, +penstock::sim::choose)
}  // namespace at::native
