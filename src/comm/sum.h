#pragma once
// The local half of a reduce-scatter: adds what the ranks sent, in fp32 and in rank order.
#include <cstdint>
#include <vector>

#include "src/place/placement.h"

namespace penstock::comm {

// dst = [dst +] scale * (sources[0] + sources[1] + ...), summed in fp32 in the order given, rounded
// once to `dst_dtype`. dst may be one of the sources when the dtypes agree. Split over
// at::parallel_for; SIMD (Highway) chosen at run time.
void sum_chunks(void* dst, Dtype dst_dtype, const std::vector<const void*>& sources, Dtype dtype,
                int64_t numel, float scale, bool accumulate);

}  // namespace penstock::comm
