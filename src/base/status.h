#pragma once
// Status: where a rank is and what it waits for. `penstock status` reads the status of another
// process. A RankStatus is a plain value, usable from any thread.
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "penstock/export.h"

namespace penstock {

// Name of the anonymous file that each rank keeps open; /proc/PID/fd lists it.
inline constexpr const char* kStatusFile = "penstock-status";

// Name of the lane that waits for the disk and not for a peer.
inline constexpr const char* kDiskLane = "disk";

// Numbers that a rank (src/engine) publishes about its last applied step, under the names in
// docs/monitoring.md. Byte counts are current values.
inline constexpr std::array<const char*, 12> kStepNumbers = {
    "step",         "step_s", "loss",      "grad_norm",    "lr",         "samples_per_s",
    "tokens_per_s", "mfu",    "exposed_s", "device_bytes", "host_bytes", "disk_bytes"};
using StepNumbers = std::array<double, kStepNumbers.size()>;  // NaN: not known

struct PENSTOCK_API RankStatus {
  // A long text is cut off and ends in "...". The text is "?" if the process was stopped while it
  // wrote the text.
  struct Line {
    int64_t step = 0;
    double age_s = 0.0;  // since the line began
    std::string text;
  };
  // A thread of the rank that exchanges data with peers.
  struct Lane {
    std::string name;
    bool waits = false;    // true: the lane waits in the collective `line`; false: `line` was the
                           // lane's last collective
    int peer = -1;         // the peer that it waits for; -1: not known yet
    int64_t sequence = 0;  // number of the lane's collectives before this one
    uint32_t tag = 0;      // equal on the ranks that make the same collective
    Line line;
  };

  int rank = 0, size = 1;
  int64_t pid = 0;   // process id in the rank's own PID namespace
  uint64_t run = 0;  // the same on all ranks of a run; 0: the ranks have not met yet
  Line at;           // what the model's thread does
  std::vector<Lane> lanes;
  std::vector<Line> log;            // the last plan lines, the oldest first
  std::vector<std::string> roster;  // by rank: "host pid"; empty: the ranks have not met yet
  double step_age_s = -1.0;         // since the last applied step; below 0: no step was applied
  StepNumbers numbers{};            // of the last applied step

  // Reads a status file such as "/proc/123/fd/9". Returns nothing if the file is not a status file
  // of this version. Throws RuntimeFault if the file cannot be read.
  static std::optional<RankStatus> read(const std::string& path);
};

}  // namespace penstock
