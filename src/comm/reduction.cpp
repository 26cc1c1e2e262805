#include "src/comm/reduction.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <optional>

#include "src/device/device.h"
#include "src/device/sum.h"

namespace penstock::comm {

namespace {

using c10d::ReduceOp;

bool is_sum(ReduceOp::RedOpType op) {
  return op == ReduceOp::SUM || op == ReduceOp::AVG || op == ReduceOp::PREMUL_SUM;
}

void add_one(ReduceOp::RedOpType op, at::Tensor& into, const at::Tensor& next) {
  switch (op) {
    case ReduceOp::PRODUCT:
      into.mul_(next);
      return;
    case ReduceOp::MIN:
      into.copy_(into.minimum(next));
      return;
    case ReduceOp::MAX:
      into.copy_(into.maximum(next));
      return;
    case ReduceOp::BAND:
      into.bitwise_and_(next);
      return;
    case ReduceOp::BOR:
      into.bitwise_or_(next);
      return;
    case ReduceOp::BXOR:
      into.bitwise_xor_(next);
      return;
    default:
      into.add_(next);
  }
}

}  // namespace

Reduction::Reduction(const ReduceOp& op, at::ScalarType dtype, int ranks)
    : op_(op.op_), dtype_(dtype) {
  TORCH_CHECK(op_ != ReduceOp::UNUSED,
              "[comm::Reduction] the reduce operation is not set (UNUSED)");
  if (op_ == ReduceOp::AVG) scale_ = 1.0 / ranks;
  if (op_ != ReduceOp::PREMUL_SUM) return;
  // All back ends use this class, not only NCCL. No other name for it exists in all versions of
  // torch.
  const auto* given = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK(given != nullptr && !given->tensor_factor.defined(),
              "[comm::Reduction] PREMUL_SUM needs a number as its factor, not a tensor");
  scale_ = given->double_factor;
}

// Sums of floating-point values are added in fp32 ([Note: Many ranks], channel.h).
void Reduction::run(void* to, std::span<const void* const> sources, int64_t count) const {
  if (count == 0) return;
  const std::optional<Dtype> dtype = device::find_dtype(dtype_);
  if (!is_sum(op_) || !dtype) return run_generic(to, sources, count);
  device::sum_chunks({to, *dtype, sources, *dtype, count, static_cast<float>(scale_)});
}

void Reduction::run_generic(void* to, std::span<const void* const> sources, int64_t count) const {
  const auto view = [&](const void* at) {
    return at::from_blob(const_cast<void*>(at), {count}, at::TensorOptions(dtype_));
  };
  at::Tensor sum = view(sources[0]).clone();
  for (const void* source : sources.subspan(1)) {
    at::Tensor next = view(source);
    add_one(op_, sum, next);
  }
  // An average of integers is rounded toward zero.
  if (scale_ != 1.0 && c10::isIntegralType(dtype_, true)) {
    sum = sum.div(scale_ == 0.0 ? 1.0 : 1.0 / scale_, "trunc");
  } else if (scale_ != 1.0) {
    sum.mul_(scale_);
  }
  view(to).copy_(sum);
}

}  // namespace penstock::comm
