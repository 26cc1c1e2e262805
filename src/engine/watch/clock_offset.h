#pragma once
// The offset between the steady clocks of ranks on several hosts.
#include <cstdint>

#include "src/engine/step/unit_order.h"

namespace penstock::engine {

// [all ranks] Returns the ns to add to this rank's clock to get rank 0's clock. Returns 0 if the
// bounds allow equal clocks, as on one host. If rank 0 reads its clock before an exchange and this
// rank reads its clock after the exchange, rank 0's time is the earlier one, and vice versa. So
// each exchange bounds the offset from both sides. The middle of the bounds is off by at most half
// of the shortest exchange.
int64_t clock_offset(const Share& share);

}  // namespace penstock::engine
