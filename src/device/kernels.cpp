#include "src/device/kernels.h"

#include <ATen/Context.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <optional>

#include "src/base/text.h"
#include "src/device/device.h"
#include "src/device/host_kernels.h"
#include "src/device/stream_event.h"

namespace penstock::device {

namespace {

constexpr int64_t kBounceBytes = 8 << 20;

bool on_host(Address one, Address other) {
  return one.device == nullptr && other.device == nullptr;
}

// Returns the values as integers of the same size, so that a NaN equals itself.
at::Tensor bits(const at::Tensor& values) {
  return values.view(values.element_size() == 4 ? at::kInt : at::kShort);
}

// Compares bits after rounding `kept`, as the host's take_edits() does.
at::Tensor changed(const at::Tensor& kept, const at::Tensor& values) {
  return bits(kept.to(values.scalar_type())).ne(bits(values));
}

// Copies between a device and host memory of the same dtype. The host does not wait if its memory
// is pinned. It waits for other memory: the caller may free that memory at once, and a device that
// can read all of the host's memory may read it later.
void copy_across(const at::Tensor& to, const at::Tensor& from) {
  const bool sends = from.is_cpu();
  const at::Tensor &host = sends ? from : to, &there = sends ? to : from;
  to.copy_(from, at::globalContext().isPinnedPtr(host.const_data_ptr(), there.device().type()));
}

// Copies host values to the device without changing the dtype.
at::Tensor sent(const at::Tensor& values, const Device& device) {
  at::Tensor there = at::empty(values.sizes(), values.options().device(device.where()));
  copy_across(there, values);
  return there;
}

// Returns pinned host memory, so that copies from a device do not block the host. If no memory can
// be pinned, returns unpinned memory; copies to it block.
at::Tensor bounce_buffer(int64_t numel, at::ScalarType type) {
  try {
    return at::empty({numel}, at::TensorOptions(type).pinned_memory(true));
  } catch (const c10::Error&) {
    return at::empty({numel}, type);
  }
}

// Adds values of a device to host memory. Two buffers take turns: while the host adds the values of
// one, the device fills the other.
void add_to_host(Address to, Dtype to_dtype, const at::Tensor& from, Dtype from_dtype,
                 const Device& device) {
  struct PinnedPiece {
    at::Tensor buffer;
    std::optional<StreamEvent> arrived{};
  };
  const int64_t numel = from.numel();
  const int64_t piece = std::min(numel, kBounceBytes / dtype_bytes(from_dtype));
  std::array<PinnedPiece, 2> pieces;
  for (PinnedPiece& one : pieces) one.buffer = bounce_buffer(piece, from.scalar_type());
  const auto send = [&](int64_t begin, PinnedPiece& into) {
    const int64_t count = std::min(piece, numel - begin);
    if (count <= 0) return;
    copy_across(into.buffer.narrow(0, 0, count), from.narrow(0, begin, count));
    into.arrived.emplace(device.current());
  };
  send(0, pieces[0]);
  for (int64_t begin = 0, turn = 0; begin < numel; begin += piece, ++turn) {
    PinnedPiece& here = pieces[static_cast<size_t>(turn % 2)];
    send(begin + piece, pieces[static_cast<size_t>((turn + 1) % 2)]);
    here.arrived->synchronize();
    host::take((to + begin * dtype_bytes(to_dtype)).data, to_dtype, here.buffer.const_data_ptr(),
               from_dtype, std::min(piece, numel - begin), true);
  }
}

void take_across(Address target, Dtype to_dtype, Address source, Dtype from_dtype, int64_t numel,
                 bool accumulate) {
  const at::Tensor from = view(source, from_dtype, numel);
  if (target.device == nullptr && accumulate)
    return add_to_host(target, to_dtype, from, from_dtype, *source.device);
  const at::Tensor to = view(target, to_dtype, numel);
  if (source.device == nullptr) {  // host to device
    if (!accumulate && to.scalar_type() == from.scalar_type()) {
      copy_across(to, from);
    } else if (accumulate) {
      to.add_(sent(from, *target.device));
    } else {
      to.copy_(sent(from, *target.device));
    }
    return;
  }
  copy_across(to, from.to(to.scalar_type()));  // casts on the device: the host only receives
}

}  // namespace

// The copy is asynchronous; the caller orders it with fences ([Note: Order on a device]).
void copy(Address to, Address from, int64_t bytes) {
  if (bytes == 0) return;
  if (on_host(to, from)) {
    std::memcpy(to.data, from.data, static_cast<size_t>(bytes));
    return;
  }
  const Unseen unseen;
  const at::Tensor target = view(to, at::kByte, bytes), source = view(from, at::kByte, bytes);
  if (to.device == from.device) {
    target.copy_(source);
  } else {
    copy_across(target, source);
  }
}

void zero(Address at, int64_t bytes) {
  if (bytes == 0) return;
  if (at.device == nullptr) {
    std::memset(at.data, 0, static_cast<size_t>(bytes));
    return;
  }
  const Unseen unseen;
  view(at, at::kByte, bytes).zero_();
}

void take(Address to, Dtype to_dtype, Address from, Dtype from_dtype, int64_t numel,
          bool accumulate) {
  if (on_host(to, from)) {
    return host::take(to.data, to_dtype, from.data, from_dtype, numel, accumulate);
  }
  if (numel == 0) return;
  const Unseen unseen;
  if (to.device == nullptr || from.device == nullptr) {
    return take_across(to, to_dtype, from, from_dtype, numel, accumulate);
  }
  const at::Tensor target = view(to, to_dtype, numel), source = view(from, from_dtype, numel);
  if (accumulate) {
    target.add_(source);
  } else {
    target.copy_(source);
  }
}

bool take_checked(Address to, Dtype to_dtype, Address from, Dtype from_dtype, int64_t numel,
                  bool accumulate) {
  if (on_host(to, from)) {
    return host::take_checked(to.data, to_dtype, from.data, from_dtype, numel, accumulate);
  }
  take(to, to_dtype, from, from_dtype, numel, accumulate);
  return true;
}

at::Tensor brought(Address values, Dtype dtype, int64_t numel, const Device* where) {
  const Unseen unseen;
  const at::Tensor own = view(values, dtype, numel);
  if (values.device == where) return own;
  return where == nullptr ? own.cpu() : sent(own, *where);
}

Address address_of(const at::Tensor& values, const Device* where) {
  return {const_cast<void*>(values.const_data_ptr()), values.is_cpu() ? nullptr : where};
}

void take_edits(Address kept, Dtype kept_dtype, Address values, Dtype dtype, int64_t numel) {
  if (on_host(kept, values)) {
    return host::take_edits(kept.data, kept_dtype, values.data, dtype, numel);
  }
  if (numel == 0) return;
  const Unseen unseen;
  const at::Tensor own = view(kept, kept_dtype, numel), seen = view(values, dtype, numel);
  own.copy_(at::where(changed(own, seen), seen.to(own.scalar_type()), own));
}

void take_edits(Address kept, Address values, Address base, Dtype dtype, int64_t numel) {
  PENSTOCK_ASSERT(kept.device == base.device, "[device::take_edits] `base` is elsewhere");
  if (on_host(kept, values)) {
    auto* const masters = reinterpret_cast<float*>(kept.data);
    return host::take_edits(masters, values.data, base.data, dtype, numel);
  }
  if (numel == 0) return;
  const Unseen unseen;
  const at::Tensor own = view(kept, Dtype::kFp32, numel), seen = view(values, dtype, numel);
  const at::Tensor published = view(base, dtype, numel), value = seen.to(at::kFloat);
  const at::Tensor unsent = own.to(seen.scalar_type()).to(at::kFloat).sub(published.to(at::kFloat));
  const at::Tensor taken = at::where(unsent.isfinite(), value.add(unsent), value);
  own.copy_(at::where(changed(published, seen), taken, own));
}

void scale(Address values, int64_t numel, float factor) {
  const Unseen unseen;
  view(values, Dtype::kFp32, numel).mul_(factor);
}

at::Tensor norm_on_device(Address values, Dtype dtype, int64_t numel) {
  const Unseen unseen;
  return at::linalg_vector_norm(view(values, dtype, numel), 2, std::nullopt, false, at::kFloat);
}

at::Tensor exact_squares_on_device(Address values, Dtype dtype, int64_t numel) {
  const Unseen unseen;
  return at::linalg_vector_norm(view(values, dtype, numel), 2, std::nullopt, false, at::kDouble)
      .square_();
}

at::Tensor edited_on_device(Address kept, Dtype kept_dtype, Address values, Dtype dtype,
                            int64_t numel) {
  const Unseen unseen;
  return changed(view(kept, kept_dtype, numel), view(values, dtype, numel)).any();
}

at::Tensor sum_on_device(Address values, Dtype dtype, int64_t numel) {
  const Unseen unseen;
  return view(values, dtype, numel).sum(at::kFloat);
}

at::Tensor fingerprint(Address values, int64_t bytes) {
  const Unseen unseen;
  const at::Tensor words = view(values, at::kLong, bytes / 8).view({-1, 64});
  // The sums are weighted by position, so that the result depends on their order.
  const auto folded = [&](int64_t dim) {
    const at::Tensor sums = words.sum(dim);
    const at::Tensor weights = at::arange(1, sums.numel() + 1, sums.options());
    return sums.mul(weights.mul_(int64_t{0x1E3779B97F4A7C15})).sum();
  };
  return at::stack({folded(0), folded(1)});
}

at::Tensor differ(const at::Tensor& one, const at::Tensor& other) {
  const Unseen unseen;
  return one.ne(other).sum(at::kDouble);
}

// All scalars share one transfer, since every transfer waits for the stream. Scalars of one dtype
// are converted together.
std::vector<double> read(const std::vector<at::Tensor>& scalars) {
  if (scalars.empty()) return {};
  const Unseen unseen;
  std::map<at::ScalarType, std::vector<size_t>> alike;  // indices of scalars
  for (size_t i = 0; i < scalars.size(); ++i) alike[scalars[i].scalar_type()].push_back(i);
  std::vector<at::Tensor> wide;
  for (const auto& [dtype, indices] : alike) {
    std::vector<at::Tensor> own;
    for (const size_t i : indices) own.push_back(scalars[i]);
    wide.push_back(at::stack(own).to(at::kDouble));
  }
  const at::Tensor all = (wide.size() == 1 ? wide.front() : at::cat(wide)).cpu();
  const auto* next = all.const_data_ptr<double>();
  std::vector<double> values(scalars.size());
  for (const auto& [dtype, indices] : alike) {
    for (const size_t i : indices) values[i] = *next++;
  }
  return values;
}

void sum_on_device(const Sum& sum) {
  if (sum.numel == 0) return;
  const Unseen unseen;
  const at::Tensor target = view(sum.dst, sum.dst_dtype, sum.numel);
  const auto source = [&](size_t first, int64_t count) {  // in the memory of dst
    return view({const_cast<void*>(sum.sources[first]), sum.dst.device}, sum.dtype, count);
  };
  // The values that an all-to-all received are a matrix. One pass adds its rows in fp32.
  const size_t rows = sum.sources.size();
  const auto* const first = static_cast<const char*>(sum.sources.front());
  bool matrix = rows > 1, aside = true;
  for (size_t i = 0; i < rows; ++i) {
    const int64_t before = static_cast<int64_t>(i) * sum.numel * dtype_bytes(sum.dtype);
    matrix = matrix && sum.sources[i] == first + before;
    aside = aside && sum.sources[i] != sum.dst.data;
  }
  // If division by the number of rows is exact, this pass also scales and rounds.
  const bool exact = (rows & (rows - 1)) == 0 && sum.scale * static_cast<float>(rows) == 1.0F;
  // The sum itself may overflow fp16. A sum of wider values must not be rounded before it is
  // scaled.
  const bool rounds_once =
      sum.dst_dtype == Dtype::kFp32 || (sum.dst_dtype == sum.dtype && sum.dtype == Dtype::kBf16);
  if (matrix && aside && exact && rounds_once && !sum.accumulate) {
    const auto count = static_cast<int64_t>(rows);
    at::Tensor mean = target;
    at::mean_out(mean, source(0, count * sum.numel).view({count, sum.numel}), 0, false,
                 target.scalar_type());
    return;
  }
  // An all-reduce sums into one of its sources, which must not be written before it is added.
  const bool in_place = aside && sum.dst_dtype == Dtype::kFp32 && !sum.accumulate;
  at::Tensor total =
      in_place ? target : at::empty(target.sizes(), target.options().dtype(at::kFloat));
  if (matrix) {
    const auto count = static_cast<int64_t>(rows);
    at::sum_out(total, source(0, count * sum.numel).view({count, sum.numel}), 0, false, at::kFloat);
  } else {
    total.copy_(source(0, sum.numel));
    for (size_t i = 1; i < rows; ++i) total.add_(source(i, sum.numel));
  }
  if (sum.scale != 1.0F) total.mul_(sum.scale);
  if (sum.accumulate) {
    target.add_(total);
  } else if (!in_place) {
    target.copy_(total);
  }
}

}  // namespace penstock::device
