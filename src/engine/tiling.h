#pragma once
// [Note: Tiles] A weight that is too large to be gathered at once is split by rows. Each tile is a
// parameter of its own in a unit of its own, which no module of the user's holds; the user's
// parameter stays where it is, as an object without memory. A tile's unit is entered and left at
// each use by the operators in tiled_ops.cpp, so a weight that is used twice (tied) is gathered
// twice, and its gradient moves after each use.
#include <string>
#include <vector>

#include "penstock/core.h"
#include "src/mem/arena.h"

namespace penstock::engine {

struct Tiled {
  std::string name;
  at::Tensor whole;            // the user's parameter
  int index = 0;               // in the user's model
  std::vector<int64_t> first;  // row of each tile, and the number of rows
  std::vector<int> units;      // of each tile
  mem::Lease gathered;         // memory of `whole` inside gathered()
  at::Tensor returned;         // what `whole` gets at close()
  size_t num_returned = 0;     // tiles that are in it

  int64_t columns() const { return whole.size(1); }
  int64_t rows(size_t tile) const { return first[tile + 1] - first[tile]; }
};

struct Split {
  ModelTree tree;  // tiled parameters belong to no module; their tiles come last
  std::vector<Tiled> tiled;
};

// Throws ConfigError for names that match nothing and weights that cannot be split.
Split split_large(const ModelTree& tree, const Config& config);

}  // namespace penstock::engine
