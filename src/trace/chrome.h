#pragma once
// Writes a rank's events as a Chrome trace ("Trace Event Format"), which Perfetto and
// chrome://tracing open.
#include <map>
#include <string>
#include <vector>

#include "src/trace/recorder.h"

namespace penstock::trace {

// Maps the text of a plan line or of a computing unit to the seconds that the simulator predicts.
using Predicted = std::map<std::string, double>;

// Returns JSON objects separated by commas, without the enclosing brackets, so that the texts of
// ranks can be joined. The trace has one process per rank, one thread per row and one slice per
// event; times are in microseconds. Slices have args "step", "bytes", "GB/s" and "predicted_ms".
// Arrows lead from a plan line on a lane to the row that waited for it. Disk reads and writes
// overlap, so they are asynchronous slices.
std::string chrome_events(const Recorder& of, const std::vector<Event>& events,
                          const Predicted& predicted = {});
// Returns the content of the trace file, made of these texts. `metadata`: JSON.
std::string chrome_trace(const std::vector<std::string>& parts, const std::string& metadata);

// Must be called after an error. Writes the last events of this rank to a file in the folder
// About::folder, and replaces the file of an earlier error. Returns the end of a sentence (";
// ..."), which names the file and says whether it was written. Returns "" if no folder is set. Any
// thread may call it.
std::string dump(const Recorder& of);

}  // namespace penstock::trace
