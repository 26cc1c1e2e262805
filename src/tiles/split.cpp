#include "src/tiles/split.h"

#include <fnmatch.h>

#include <algorithm>
#include <string>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"

namespace penstock::tiles {

namespace {

class Splitter {
 public:
  Splitter(const ModelTree& tree, const TilingConfig& tiling, const DtypeOf& dtype_of)
      : tiling_(tiling), dtype_of_(dtype_of), split_{tree, {}}, users_(tree.params.size()) {
    for (size_t m = 0; m < tree.modules.size(); ++m) {
      for (const int p : tree.modules[m].params) users_[p].push_back(static_cast<int>(m));
    }
  }

  Split run() && {
    check_names();
    const size_t num_params = split_.tree.params.size();
    for (size_t p = 0; p < num_params; ++p) {
      if (wanted(static_cast<int>(p))) tile(static_cast<int>(p));
    }
    return std::move(split_);
  }

 private:
  const ModuleInfo& module(int index) const { return split_.tree.modules[index]; }

  bool is_head(int m) const { return tiling_.loss_tokens > 0 && module(m).name == tiling_.head; }

  void check_names() const {
    std::vector<std::string> names, patterns = tiling_.modules;
    for (const ModuleInfo& info : split_.tree.modules) {
      if (info.rows >= 0) names.push_back(info.name);
    }
    if (names.empty()) {
      throw ConfigError(
          "[tiles::split_large] tiling: the model has no plain nn.Linear or nn.Embedding that can "
          "be split (the C++ front does not tile yet); leave \"tiling\" out");
    }
    if (tiling_.loss_tokens > 0) patterns.push_back(tiling_.head);
    for (const std::string& pattern : patterns) {
      const auto matches = [&](const std::string& name) {
        return fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
      };
      if (std::any_of(names.begin(), names.end(), matches)) continue;
      const std::string near = nearest(pattern, names);
      throw ConfigError(
          concat("[tiles::split_large] tiling: no plain nn.Linear or nn.Embedding is named \"",
                 pattern, "\"", near.empty() ? "" : concat("; did you mean \"", near, "\"?")));
    }
  }

  // Returns the bytes of the whole weight in its compute dtype.
  int64_t bytes(int p) const {
    const ParamInfo& info = split_.tree.params[p];
    return info.param.numel() * dtype_bytes(dtype_of_(info));
  }

  bool named(int m) const {
    return std::any_of(tiling_.modules.begin(), tiling_.modules.end(), [&](const auto& pattern) {
      return fnmatch(pattern.c_str(), module(m).name.c_str(), 0) == 0;
    });
  }

  // A parameter of the head is tiled. A large parameter is tiled if its module is named, or if no
  // module is named. Every module that has a tiled parameter must use it row by row.
  bool wanted(int p) const {
    bool head = false, mentioned = false, by_rows = !users_[p].empty();
    for (const int m : users_[p]) {
      head |= module(m).rows == p && is_head(m);
      mentioned |= module(m).rows == p && named(m);
      by_rows &= module(m).rows == p;
    }
    const bool large = tiling_.max_bytes > 0 && bytes(p) > tiling_.max_bytes;
    if (!head && !(large && (mentioned || tiling_.modules.empty()))) return false;
    if (by_rows || !(head || mentioned)) return by_rows;
    throw ConfigError(concat("[tiles::split_large] tiling: \"", split_.tree.params[p].name,
                             "\" also belongs to a module that is not a plain nn.Linear or "
                             "nn.Embedding and needs the parameter whole"));
  }

  void tile(int p) {
    const ParamInfo info = split_.tree.params[p];
    const int64_t rows = info.param.size(0), row_bytes = bytes(p) / rows;
    const int64_t limit = tiling_.max_bytes > 0 ? tiling_.max_bytes : bytes(p);
    if (row_bytes > limit) {
      throw ConfigError(concat("[tiles::split_large] \"tiling.max_bytes\" is ", limit,
                               ", less than one row of \"", info.name, "\", which has ", row_bytes,
                               " bytes"));
    }
    const int64_t most = limit / row_bytes;
    const int64_t count = (rows + most - 1) / most;
    TiledWeight tiled;
    tiled.name = info.name;
    tiled.whole = info.param;
    tiled.trainable = info.param.requires_grad();
    // Tiles differ by at most one row in size.
    for (int64_t i = 0; i <= count; ++i) tiled.first.push_back(i * rows / count);
    const int owner = users_[p].front();
    for (const int m : users_[p]) std::erase(split_.tree.modules[m].params, p);
    for (int64_t i = 0; i < count; ++i) {
      const std::string name = tiled.tile_name(i);
      at::Tensor part = info.param.detach().narrow(0, tiled.first[i], tiled.rows(i)).detach();
      part.set_requires_grad(tiled.trainable);
      tiled.tiles.push_back(part);
      split_.tree.modules.push_back(
          {name, "Tile", owner, {static_cast<int>(split_.tree.params.size())}});
      split_.tree.params.push_back({name, part, info.group, p});
    }
    split_.tiled.push_back(std::move(tiled));
  }

  const TilingConfig& tiling_;
  const DtypeOf& dtype_of_;
  Split split_;
  std::vector<std::vector<int>> users_;  // modules that own each parameter
};

}  // namespace

Split split_large(const ModelTree& tree, const TilingConfig& tiling, const DtypeOf& dtype_of) {
  if (!tiling.any()) return {tree, {}};
  return Splitter(tree, tiling, dtype_of).run();
}

}  // namespace penstock::tiles
