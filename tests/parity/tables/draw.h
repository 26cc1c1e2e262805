#pragma once
// A random case: a strategy with some cells changed, on some mesh, in some training loop. Pure
// values; no torch.
#include <cstdint>
#include <string>
#include <vector>

#include "src/plan/table.h"

namespace penstock::tables {

struct Cell {
  Role role{};
  Phase phase{};
  Placement place;
  std::string name() const;  // "table.grad.hold"
};

// What the training loop does besides `accumulate` times forward and backward, then a step.
struct Loop {
  int accumulate = 1;
  bool look_early = false;   // full gradients are read within a window too
  bool evaluate = false;     // a forward without gradients, between a forward and its backward
  bool twice = false;        // two backwards of one forward
  bool incomplete = false;   // the last window is closed by force after its first backward
  bool read = false;         // gathers parameters between two windows
  bool read_inside = false;  // ... and between a forward and its backward
  bool save = false;         // saves between two windows, trains another one, and loads
  bool write = false;        // rank 0 changes gathered parameters between two windows
};

struct Draw {
  uint64_t seed = 0;
  int world = 1, nodes = 1;
  std::string strategy;
  TableOptions options;  // of the preset
  bool late_update = false;
  int64_t prefetch_bytes = 0, bucket_bytes = 0;
  bool sums_as_fp32 = false;
  std::vector<Cell> cells;  // that differ from the preset
  Loop loop;

  Table table() const;
  // Some cell, or the precision, is narrower than fp32.
  bool narrow() const;
  std::string config() const;  // JSON
  std::string text() const;    // all of it, in two lines
};

// A pure function of `seed`. Two thirds of the draws change cells as a person would (the optimizer
// to another layout, with its gradients), the rest singly and blindly.
Draw draw(uint64_t seed);

}  // namespace penstock::tables
