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

// `dtype_of` returns a parameter's compute dtype, which also determines the byte size of a tile.
// Throws ConfigError for names that match nothing and for weights that cannot be split.
Split split_large(const ModelTree& tree, const TilingConfig& tiling, const DtypeOf& dtype_of);

}  // namespace penstock::tiles
