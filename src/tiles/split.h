#pragma once
// Splits large weights of a model into tiles (see [Note: Tiles]) before its units are found.
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

// `dtype_of`: what a parameter computes in, since a tile's size is counted in that. Throws
// ConfigError for names that match nothing and weights that cannot be split.
Split split_large(const ModelTree& tree, const TilingConfig& tiling, const DtypeOf& dtype_of);

}  // namespace penstock::tiles
