#include "src/parallel/peers.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <vector>

#include "src/device/kernels.h"

namespace penstock::parallel {

namespace {

Dtype dtype_of(const at::Tensor& values) {
  switch (values.scalar_type()) {
    case at::kFloat:
      return Dtype::kFp32;
    case at::kBFloat16:
      return Dtype::kBf16;
    case at::kHalf:
      return Dtype::kFp16;
    default:
      TORCH_CHECK(false, "[parallel::Peers] values of ", values.scalar_type(),
                  " cannot be added up over tensor ranks: float32, bfloat16 or float16");
  }
}

void check_host(const at::Tensor& values) {
  TORCH_CHECK(values.is_cpu(), "[parallel::Peers] tensor ranks exchange host memory as yet, not ",
              values.device());
}

}  // namespace

Peers::Peers(Group& group, const Members& members) : members_(members), channel_(group, "act") {}

void Peers::check(const at::Tensor& values, int64_t dim) const {
  TORCH_CHECK(values.size(dim) % size() == 0, "[parallel::Peers] ", values.size(dim),
              " along dimension ", dim, " do not divide evenly by ", size(), " tensor ranks");
}

// Padded so that every rank adds up as many.
at::Tensor Peers::reduce(const at::Tensor& addend, bool gathers) {
  check_host(addend);
  const Dtype dtype = dtype_of(addend);
  const int64_t numel = addend.numel(), shard = (numel + size() - 1) / size();
  at::Tensor values = at::zeros({shard * size()}, addend.options());
  values.narrow(0, 0, numel).copy_(addend.reshape({-1}));
  if (size() == 1 || numel == 0) return values;
  const at::Tensor scratch = at::empty({shard * (size() - 1)}, addend.options());
  comm::ReduceBuffer buffer;
  buffer.partial = values.data_ptr();
  buffer.scratch = scratch.data_ptr();
  buffer.dtype = buffer.result_dtype = dtype;
  buffer.numel = values.numel();
  if (gathers) {
    channel_.all_reduce("all_reduce(tensor)", members_, {buffer});
    return values;
  }
  const at::Tensor own = at::empty({shard}, addend.options());
  buffer.result = own.data_ptr();
  channel_.reduce_scatter("reduce_scatter(tensor)", members_, {buffer});
  return own;
}

at::Tensor Peers::sum(const at::Tensor& addend) {
  return reduce(addend, true).narrow(0, 0, addend.numel()).view(addend.sizes());
}

at::Tensor Peers::sum_and_cut(const at::Tensor& addend, int64_t dim) {
  check(addend, dim);
  const at::Tensor first = addend.movedim(dim, 0);
  std::vector<int64_t> sizes = first.sizes().vec();
  sizes[0] /= size();
  return reduce(first, size() == 1).view(sizes).movedim(0, dim).contiguous();
}

at::Tensor Peers::gather(const at::Tensor& part, int64_t dim) {
  check_host(part);
  const at::Tensor first = part.movedim(dim, 0);
  std::vector<int64_t> sizes = first.sizes().vec();
  sizes[0] *= size();
  const at::Tensor full = at::empty(sizes, part.options());
  full.narrow(0, rank() * first.size(0), first.size(0)).copy_(first);
  if (size() > 1 && part.numel() > 0) {
    const auto bytes = static_cast<int64_t>(part.nbytes());
    channel_.all_gather("all_gather(tensor)", members_, {{full.data_ptr(), bytes}});
  }
  return full.movedim(0, dim).contiguous();
}

at::Tensor Peers::cut(const at::Tensor& whole, int64_t dim) const {
  check(whole, dim);
  const int64_t own = whole.size(dim) / size();
  return whole.narrow(dim, rank() * own, own).clone(at::MemoryFormat::Contiguous);
}

}  // namespace penstock::parallel
