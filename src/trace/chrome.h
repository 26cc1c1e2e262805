#pragma once
// The events of a rank as a Chrome trace ("Trace Event Format", which Perfetto and chrome://tracing
// open).
#include <map>
#include <string>
#include <vector>

#include "src/trace/recorder.h"

namespace penstock::trace {

// By the text of a line or of what computes: the seconds that the simulator has for it.
using Predicted = std::map<std::string, double>;

// One process a rank, one thread a row, one slice an event, in microseconds: objects, separated by
// commas and without the brackets around them, so that ranks' texts can be put one behind the
// other. Slices have args "step", "bytes", "GB/s" and "predicted_ms"; arrows lead from a lane's
// line to who waited for it. Reads and writes of the disk overlap, so they are asynchronous slices.
std::string chrome_events(const Recorder& of, const std::vector<Event>& events,
                          const Predicted& predicted = {});
// The whole file of these texts. `metadata`: JSON.
std::string chrome_trace(const std::vector<std::string>& parts, const std::string& metadata);

// After an error: the last events of this rank into a file of its folder, in place of the one that
// an error before has left. Returns where it is, or why there is none, as the end of a sentence
// ("; ..."); "" where nobody asked for it. Any thread.
std::string dump(const Recorder& of);

}  // namespace penstock::trace
