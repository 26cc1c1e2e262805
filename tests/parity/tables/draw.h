#pragma once
// A random case: a strategy with some changed cells, a mesh and a training loop. Plain values,
// without torch.
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

// What the training loop does in addition to `accumulate` forwards and backwards and a step.
struct Loop {
  int accumulate = 1;
  bool look_early = false;   // also reads full gradients within a window
  bool evaluate = false;     // a forward without gradients, between a forward and its backward
  bool twice = false;        // two backwards of one forward
  bool incomplete = false;   // forces the last window's step after its first backward
  bool read = false;         // gathers parameters between two windows
  bool read_inside = false;  // also gathers them between a forward and its backward
  bool save = false;         // saves between two windows, trains one more window, and loads
  bool write = false;        // rank 0 changes gathered parameters between two windows
};

struct Draw {
  uint64_t seed = 0;
  int world = 1, nodes = 1;
  std::string strategy;
  TableOptions options;  // options of the preset
  bool late_update = false;
  int64_t prefetch_bytes = 0, bucket_bytes = 0;
  bool sums_as_fp32 = false;
  std::vector<Cell> cells;  // the cells that differ from the preset
  Loop loop;

  Table table() const;
  // Returns whether the precision or the dtype of some cell is narrower than fp32.
  bool narrow() const;
  std::string config() const;  // JSON
  std::string text() const;    // the whole draw, in two lines
};

// A pure function of `seed`. Two thirds of the draws change cells as a person would (for example,
// the layout of the optimizer together with its gradients). The others change single cells blindly.
Draw draw(uint64_t seed);

}  // namespace penstock::tables
