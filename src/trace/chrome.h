#pragma once
// Writes a rank's events as a Chrome trace ("Trace Event Format"), which Perfetto and
// chrome://tracing open.
#include <map>
#include <string>
#include <vector>

#include "src/trace/recorder.h"

namespace penstock::trace {

// Text of a plan line or of a computing unit -> seconds that the simulator predicts for it.
using Predicted = std::map<std::string, double>;

// One process per rank, one thread per row, one slice per event, in microseconds. Returns JSON
// objects separated by commas, without the enclosing brackets, so that the texts of ranks can be
// joined. Slices have args "step", "bytes", "GB/s" and "predicted_ms". Arrows lead from a lane's
// line to the row that waited for it. Disk reads and writes overlap, so they are asynchronous
// slices.
std::string chrome_events(const Recorder& of, const std::vector<Event>& events,
                          const Predicted& predicted = {});
// Returns the whole file made of these texts. `metadata`: JSON.
std::string chrome_trace(const std::vector<std::string>& parts, const std::string& metadata);

// After an error: writes the last events of this rank to a file in its folder and replaces the file
// of an earlier error. Returns a sentence end ("; ...") with the path or with the failure; "" if no
// folder is set. Any thread.
std::string dump(const Recorder& of);

}  // namespace penstock::trace
