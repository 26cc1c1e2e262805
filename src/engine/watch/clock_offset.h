#pragma once
// Clocks: what ranks on several hosts have to add to their steady clocks to agree.
#include <cstdint>

#include "src/engine/step/unit_order.h"

namespace penstock::engine {

// [all ranks] What this rank adds to its clock, in ns, to have rank 0's; 0 where the two may be the
// same, as on one host. Between its begin and its end each exchange has met every rank once: what
// rank 0 saw before one, this rank sees after it, and the other way round, so each bounds the
// difference from one side; the middle is off by at most half of the shortest exchange.
int64_t clock_offset(const Share& share);

}  // namespace penstock::engine
