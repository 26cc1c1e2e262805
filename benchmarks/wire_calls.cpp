// The C functions that wire_codec.py measures.
#include <cstdint>
#include <vector>

#include "penstock/export.h"
#include "src/device/wire_codec.h"

extern "C" {

// `wire`: text such as "int8/128/stochastic". Returns the bytes of the encoded form.
PENSTOCK_API int64_t penstock_bench_encoded_bytes(int64_t numel, const char* wire) {
  return penstock::Wire::parse(wire).encoded_bytes(numel);
}

PENSTOCK_API void penstock_bench_encode(void* to, void* from, int bf16, int64_t numel,
                                        const char* wire) {
  const auto dtype = bf16 != 0 ? penstock::Dtype::kBf16 : penstock::Dtype::kFp32;
  penstock::device::encode(to, {from, dtype, numel}, penstock::Wire::parse(wire), {1, 0});
}

// With a residual in bf16, which the encoding replaces.
PENSTOCK_API void penstock_bench_encode_fed(void* to, void* from, int bf16, int64_t numel,
                                            const char* wire, void* residual) {
  const auto dtype = bf16 != 0 ? penstock::Dtype::kBf16 : penstock::Dtype::kFp32;
  penstock::device::Residual fed;
  fed.before = fed.after = residual;
  fed.dtype = penstock::Dtype::kBf16;
  penstock::device::encode(to, {from, dtype, numel}, penstock::Wire::parse(wire), {1, 0}, fed);
}

// Sums `count` encoded pieces that lie one after another.
PENSTOCK_API void penstock_bench_decode(void* to, void* from, int bf16, int64_t numel, int count,
                                        const char* wire) {
  const auto dtype = bf16 != 0 ? penstock::Dtype::kBf16 : penstock::Dtype::kFp32;
  const penstock::Wire parsed = penstock::Wire::parse(wire);
  std::vector<const void*> sources;
  for (int i = 0; i < count; ++i) {
    sources.push_back(static_cast<char*>(from) + i * parsed.encoded_bytes(numel));
  }
  penstock::device::decode_sum({to, dtype, sources, penstock::Dtype::kFp32, numel, 0.5F}, parsed);
}

}  // extern "C"
