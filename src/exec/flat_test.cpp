#include "src/exec/flat.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/sum.h>
#include <gtest/gtest.h>

#include <cstring>

#include "src/mem/arena.h"

namespace penstock::exec {
namespace {

Slot slot_of(const std::string& name, const at::Tensor& param) {
  Slot slot;
  slot.name = name;
  slot.param = param;
  return slot;
}

TEST(Flat, ParametersAreWindowsAndReadingAFreedOneNamesIt) {
  mem::Pool pool;
  mem::Arena arena(pool);
  at::Tensor a = at::arange(6, at::kFloat).view({2, 3}).clone();
  at::Tensor b = at::arange(5, at::kFloat).clone();
  Flat flat(Dtype::kFp32, true);
  flat.add(slot_of("block.a", a), "block");
  flat.add(slot_of("block.b", b), "block");
  flat.seal(3);
  EXPECT_EQ(flat.slots[1].offset, 16);  // 64-byte alignment
  EXPECT_EQ(flat.numel % (3 * 128), 0);

  const mem::Lease whole = arena.take(flat.numel * 4, mem::Account::kParam);
  auto* values = reinterpret_cast<float*>(whole.data().host());
  for (int64_t i = 0; i < flat.numel; ++i) values[i] = 1.0F;
  flat.attach(whole.data().host());
  EXPECT_FLOAT_EQ(a.sum().item<float>(), 6.0F);
  const at::Tensor view = a.t();
  flat.detach();
  EXPECT_EQ(a.sizes(), at::IntArrayRef({2, 3}));
  try {
    view.sum();
    FAIL() << "reading a freed parameter must throw";
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what()).find("block.a"), std::string::npos);
  }
  flat.attach(whole.data().host());
  EXPECT_FLOAT_EQ(view.sum().item<float>(), 6.0F);
  flat.detach();
}

TEST(Flat, WhatNothingWasWrittenToIsZeroed) {
  mem::Pool pool;
  mem::Arena arena(pool);
  Flat flat(Dtype::kFp32, true);
  for (const int n : {3, 20, 4}) flat.add(slot_of("p", at::arange(n, at::kFloat).clone()), "u");
  flat.seal(1);
  Buffer sum;
  sum.numel = flat.numel;
  sum.memory = arena.take(flat.numel * 4, mem::Account::kGrad);
  std::memset(sum.data().host(), 1, flat.numel * 4);
  flat.slots[1].written = true;
  flat.complete(sum);
  const char* data = sum.data().host();
  for (int64_t i = 0; i < flat.numel; ++i) {
    const bool kept = i >= flat.slots[1].offset && i < flat.slots[1].offset + 20;
    EXPECT_EQ(data[i * 4], kept ? 1 : 0) << i;
  }
}

}  // namespace
}  // namespace penstock::exec
