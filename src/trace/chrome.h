#pragma once
// The events of a rank as a Chrome trace ("Trace Event Format", which Perfetto and chrome://tracing
// open).
#include <cstdint>
#include <string>
#include <vector>

#include "src/trace/recorder.h"

namespace penstock::trace {

struct TraceOf {
  int rank = 0;
  std::string host;       // shown beside the rank
  int64_t offset_ns = 0;  // what is added to this rank's clock to have rank 0's
  std::vector<std::string> rows;
};

// One process a rank, one thread a row, one slice an event, in microseconds: objects, separated by
// commas and without the brackets around them, so that ranks' texts can be put one behind the
// other. Slices have args "step", "bytes" and "GB/s"; arrows lead from a lane's line to who waited
// for it. Reads and writes of the disk overlap, so they are asynchronous slices.
std::string chrome_events(const TraceOf& of, const std::vector<Event>& events);
// The whole file of these texts. `metadata`: JSON.
std::string chrome_trace(const std::vector<std::string>& parts, const std::string& metadata);

}  // namespace penstock::trace
