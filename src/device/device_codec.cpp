#include "src/device/device_codec.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <limits>

#include "src/device/device.h"
#include "src/device/kernels.h"
#include "src/device/wire_blocks.h"

namespace penstock::device {

namespace {

constexpr int64_t kPiece = int64_t{1} << 20;  // values per round, which bounds memory

// Returns the values in rows of one block, filled up with zeros.
at::Tensor rows_of(const at::Tensor& values, int64_t block) {
  const int64_t numel = values.numel(), filled = (numel + block - 1) / block * block;
  if (filled == numel) return values.view({-1, block});
  at::Tensor rows = at::zeros({filled}, values.options());
  rows.narrow(0, 0, numel).copy_(values);
  return rows.view({-1, block});
}

at::Tensor shifted(const at::Tensor& x, int64_t bits) {  // a logical shift of int32
  return x.bitwise_right_shift(bits).bitwise_and_((int64_t{1} << (32 - bits)) - 1);
}

// Returns the numbers that random_numbers() gives for `count` indices.
at::Tensor noise_on_device(int64_t first, int64_t count, const Keys& keys,
                           const at::TensorOptions& where) {
  const auto number = [](uint32_t bits) {
    return static_cast<int64_t>(static_cast<int32_t>(bits));
  };
  const int64_t start = number(static_cast<uint32_t>(first));
  at::Tensor x = at::arange(0, count, where.dtype(at::kInt)).add_(start);
  x.bitwise_xor_(number(keys.low)).mul_(number(0x9E3779B9U)).add_(number(keys.high));
  x = x.bitwise_xor(shifted(x, 16)).mul_(number(0x85EBCA6BU));
  x = x.bitwise_xor(shifted(x, 13)).mul_(number(0xC2B2AE35U));
  return shifted(x.bitwise_xor(shifted(x, 16)), 16).to(at::kFloat).mul_(0x1p-16);
}

// Returns -1 for each bit that is set, and 1 for the others.
at::Tensor signs_on_device(const at::Tensor& bytes, int64_t count) {
  const at::Tensor bits = at::arange(0, 8, bytes.options());
  const at::Tensor set = bytes.unsqueeze(1).bitwise_right_shift(bits).bitwise_and_(1);
  return set.flatten().narrow(0, 0, count).to(at::kFloat).mul_(-2.0).add_(1.0);
}

// Returns the decoded values [at, at + count) of a piece in fp32.
at::Tensor decoded_on_device(Address piece, int64_t numel, int64_t at, int64_t count,
                             const Wire& wire) {
  const Address codes = piece + wire.scale_bytes(numel);
  at::Tensor values;
  if (wire.code == Code::kSign) {
    values = signs_on_device(view(codes + at / 8, at::kByte, (count + 7) / 8), count);
  } else if (wire.code == Code::kInt8) {
    values = view(codes + at, at::kChar, count).to(at::kFloat);
  } else if (wire.code == Code::kFp8) {
    values = view(codes + at, at::kFloat8_e4m3fn, count).to(at::kFloat);
  } else {
    const at::Tensor bytes = view(codes + at / 2, at::kByte, (count + 1) / 2);
    const at::Tensor halves =
        at::stack({bytes.bitwise_and(15), bytes.bitwise_right_shift(4)}, 1).flatten();
    values = halves.to(at::kChar).bitwise_xor_(8).sub_(8).narrow(0, 0, count).to(at::kFloat);
  }
  const at::Tensor rows = rows_of(values, wire.block);
  const at::Tensor scales =
      view(piece, at::kFloat, wire.num_blocks(numel)).narrow(0, at / wire.block, rows.size(0));
  return rows.mul(scales.unsqueeze(1)).flatten().narrow(0, 0, count);
}

// Returns the signs of `count` values, in rows of one block, as bytes. `scales` receives the means.
at::Tensor encoded_signs_on_device(const at::Tensor& rows, int64_t count,
                                   const at::Tensor& scales) {
  const int64_t block = rows.size(1);
  const at::Tensor groups =
      rows.abs().mul_(1.0 / static_cast<double>(block)).view({-1, block / 16, 16});
  at::Tensor sums = at::zeros_like(groups.select(1, 0));
  for (int64_t i = 0; i < block / 16; ++i) sums.add_(groups.select(1, i));
  for (int64_t half = 8; half > 0; half /= 2) {
    sums = sums.narrow(1, 0, half).add(sums.narrow(1, half, half));
  }
  at::Tensor mean = sums.flatten();
  const int64_t last = count % block;
  if (last > 0) {
    const auto whole = static_cast<float>(block), here = static_cast<float>(last);
    mean.narrow(0, mean.size(0) - 1, 1).mul_(static_cast<double>(whole / here));
  }
  const at::Tensor largest = rows.abs().amax({1});
  mean =
      mean.masked_fill(largest.lt(kLeast), 0.0)
          .masked_fill(largest.isfinite().logical_not(), std::numeric_limits<double>::quiet_NaN());
  scales.copy_(mean);
  const at::Tensor negative = rows.signbit().logical_and_(mean.gt(0.0).unsqueeze(1));
  const int64_t num_bytes = (count + 7) / 8;
  const at::Tensor bits = negative.flatten().narrow(0, 0, std::min(num_bytes * 8, rows.numel()));
  const at::Tensor powers = at::arange(0, 8, bits.options().dtype(at::kByte));
  return bits.view({-1, 8}).to(at::kByte).bitwise_left_shift(powers).sum({1}).to(at::kByte);
}

// Rounds values, in rows of one block, to whole steps. `scales` receives the steps.
at::Tensor rounded_on_device(const at::Tensor& rows, const Wire& wire, const Noise& noise,
                             const at::Tensor& scales) {
  const double levels = wire.levels();
  const at::Tensor largest = rows.abs().amax({1}, true);  // NaN if a value is NaN
  const at::Tensor counts = at::full_like(largest, levels);
  const at::Tensor zero = largest.lt(kLeast), whole = largest.isfinite();
  const at::Tensor step = largest.div(counts).masked_fill_(zero, 0.0).masked_fill_(
      whole.logical_not(), std::numeric_limits<double>::quiet_NaN());
  const at::Tensor inverse =
      counts.div(largest).masked_fill_(zero.logical_or(whole.logical_not()), 0.0);
  scales.copy_(step.flatten());
  at::Tensor scaled = rows.mul(inverse);
  if (wire.code == Code::kFp8) {
    scaled.nan_to_num_(0.0).clamp_(-levels, levels);
    return scaled.to(at::kFloat8_e4m3fn).view(at::kChar).flatten();
  }
  if (wire.rounding == Rounding::kStochastic) {
    scaled
        .add_(noise_on_device(noise.first, rows.numel(), keys_of(noise), scaled.options())
                  .view(rows.sizes()))
        .floor_();
  } else {
    scaled.round_();
  }
  return scaled.nan_to_num_(0.0).clamp_(-levels, levels).to(at::kChar).flatten();
}

// Encodes `count` values in rows of one block.
void write_rows_on_device(const at::Tensor& rows, int64_t count, const Wire& wire,
                          const Noise& noise, const at::Tensor& scales, Address codes) {
  if (wire.code == Code::kSign) {
    view(codes, at::kByte, (count + 7) / 8).copy_(encoded_signs_on_device(rows, count, scales));
    return;
  }
  const at::Tensor rounded = rounded_on_device(rows, wire, noise, scales).narrow(0, 0, count);
  if (wire.code != Code::kInt4) {
    view(codes, at::kChar, count).copy_(rounded);
    return;
  }
  at::Tensor halves = at::zeros({(count + 1) / 2 * 2}, rounded.options().dtype(at::kByte));
  halves.narrow(0, 0, count).copy_(rounded.bitwise_and(15));
  const at::Tensor pairs = halves.view({-1, 2});
  view(codes, at::kByte, (count + 1) / 2)
      .copy_(pairs.select(1, 0).bitwise_or(pairs.select(1, 1).bitwise_left_shift(4)));
}

// Returns the idle part of a residual, or an undefined tensor if no part is idle.
at::Tensor held_back(const at::Tensor& before, const Residual& residual) {
  at::Tensor held;
  residual.for_each_range(before.numel(), [&](int64_t begin, int64_t end, bool idle) {
    if (!idle) return;
    if (!held.defined()) held = at::zeros_like(before);
    held.narrow(0, begin, end - begin).copy_(before.narrow(0, begin, end - begin));
  });
  return held;
}

}  // namespace

void encode_on_device(Address to, const PlainValues& values, const Wire& wire, const Noise& noise,
                      const Residual& residual) {
  const Unseen unseen;
  const auto& [from, dtype, numel, base] = values;
  const at::Tensor scales = view(to, at::kFloat, wire.num_blocks(numel));
  const Address codes = to + wire.scale_bytes(numel);
  for (int64_t at = 0; at < numel; at += kPiece) {
    const int64_t count = std::min(kPiece, numel - at);
    const int64_t bytes = at * dtype_bytes(dtype);
    at::Tensor addends = view(from + bytes, dtype, count).to(at::kFloat);
    if (base.data != nullptr) {
      addends = addends.sub(view(base + bytes, dtype, count).to(at::kFloat));
    }
    const Residual here = residual.from(at);
    at::Tensor before, held;  // held: the part of `before` that is not added
    if (here.kept() && here.before.data != nullptr) {
      before = view(here.before, here.dtype, count).to(at::kFloat);
      held = held_back(before, here);
      addends = addends.add(held.defined() ? before.sub(held) : before);
    }
    const at::Tensor rows = rows_of(addends, wire.block);
    write_rows_on_device(rows, count, wire, {noise.key, noise.first + at},
                         scales.narrow(0, at / wire.block, rows.size(0)),
                         codes + wire.value_bytes(at));
    if (!here.kept()) continue;
    const at::Tensor decoded = decoded_on_device(to, numel, at, count, wire);
    if (!before.defined()) before = at::zeros_like(decoded);
    if (held.defined()) addends = addends.add(held);
    view(here.after, here.dtype, count)
        .copy_(at::where(decoded.isnan(), before, addends.sub(decoded)));
  }
  const int64_t end = wire.scale_bytes(numel) + wire.value_bytes(numel);
  view(to + end, at::kByte, wire.encoded_bytes(numel) - end).zero_();
}

void sum_pieces_on_device(const Sum& sum, const Wire& wire) {
  const Unseen unseen;
  for (int64_t at = 0; at < sum.numel; at += kPiece) {
    const int64_t count = std::min(kPiece, sum.numel - at);
    at::Tensor total;
    for (const void* source : sum.sources) {
      const at::Tensor values = decoded_on_device({const_cast<void*>(source), sum.dst.device},
                                                  sum.numel, at, count, wire);
      total = total.defined() ? total.add_(values) : values;
    }
    if (sum.scale != 1.0F) total.mul_(sum.scale);
    take(sum.dst + at * dtype_bytes(sum.dst_dtype), sum.dst_dtype,
         address_of(total.contiguous(), sum.dst.device), Dtype::kFp32, count, sum.accumulate);
  }
}

}  // namespace penstock::device
