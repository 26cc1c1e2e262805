#pragma once
// Splits large weights of a model into tiles ([Note: Tiles], weights.h) before its units are
// determined.
#include <functional>
#include <vector>

#include "penstock/core.h"
#include "src/place/placement.h"
#include "src/tiles/weights.h"

namespace penstock::tiles {

struct Split {
  ModelTree tree;  // tiled parameters belong to no module; their tiles come last
  std::vector<TiledWeight> tiled;
};

using DtypeOf = std::function<Dtype(const ParamInfo&)>;

// `dtype_of` returns the dtype that a parameter computes in; the size of a tile is counted in it.
// Throws ConfigError for names that match nothing and for weights that cannot be split.
Split split_large(const ModelTree& tree, const TilingConfig& tiling, const DtypeOf& dtype_of);

}  // namespace penstock::tiles
