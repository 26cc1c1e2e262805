#pragma once
// The offset between the steady clocks of ranks on several hosts.
#include <cstdint>

#include "src/engine/step/unit_order.h"

namespace penstock::engine {

// [all ranks] Returns the ns to add to this rank's clock to get rank 0's clock, or 0 if the clocks
// may be equal, as on one host. A time that rank 0 reads before an exchange is earlier than a time
// that this rank reads after it, and vice versa. So each exchange bounds the offset from both
// sides. The middle of the bounds is off by at most half of the shortest exchange.
int64_t clock_offset(const Share& share);

}  // namespace penstock::engine
