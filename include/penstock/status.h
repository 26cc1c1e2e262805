#pragma once
// Status: where a rank is and what it waits for, as `penstock status` reads it from another
// process. A pure value; any thread.
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "penstock/export.h"

namespace penstock {

// The name of the anonymous file that each rank keeps open: /proc/PID/fd shows it.
inline constexpr const char* kStatusFile = "penstock-status";

// What a rank says of its last applied step, by the names of docs/monitoring.md (src/engine); bytes
// are those of now.
inline constexpr std::array<const char*, 12> kStepNumbers = {
    "step",         "step_s", "loss",      "grad_norm",    "lr",         "samples_per_s",
    "tokens_per_s", "mfu",    "exposed_s", "device_bytes", "host_bytes", "disk_bytes"};
using StepNumbers = std::array<double, kStepNumbers.size()>;  // not a number: not known

struct PENSTOCK_API RankStatus {
  // Text as it was at the time; of long ones the beginning; "?" of a process that was stopped while
  // it wrote.
  struct Line {
    int64_t step = 0;
    double age_s = 0.0;  // since it began
    std::string text;
  };
  // One of the rank's threads that talk to peers.
  struct Lane {
    std::string name;
    bool waits = false;    // now, in `line`; else that is its last one
    int peer = -1;         // for whom; -1: not known yet
    int64_t sequence = 0;  // the lane's collectives before this one
    Line line;
  };

  int rank = 0, size = 1;
  int64_t pid = 0;   // as the rank itself sees it
  uint64_t run = 0;  // the same on all ranks of a run; 0: they have not met yet
  Line at;           // what the model's thread does
  std::vector<Lane> lanes;
  std::vector<Line> log;            // the last lines of the plan, the oldest first
  std::vector<std::string> roster;  // by rank: "host pid"; empty: they have not met yet
  double step_age_s = -1.0;         // since the last step was applied; below 0: none was
  StepNumbers numbers{};            // of that one

  // Of a file, such as "/proc/123/fd/9". Nothing where it is no status of this version. Throws
  // RuntimeFault when it cannot be read.
  static std::optional<RankStatus> read(const std::string& path);
};

}  // namespace penstock
