#include "src/engine/tiling.h"

#include <fnmatch.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/engine/adopt.h"
#include "src/engine/state.h"
#include "src/exec/torch_compat.h"

namespace penstock {

namespace engine {

namespace {

class Splitter {
 public:
  Splitter(const ModelTree& tree, const Config& config)
      : config_(config), tiling_(config.tiling), split_{tree, {}}, users_(tree.params.size()) {
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
          "[engine::split_large] tiling: the model has no plain nn.Linear or nn.Embedding that can "
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
          concat("[engine::split_large] tiling: no plain nn.Linear or nn.Embedding is named \"",
                 pattern, "\"", near.empty() ? "" : concat("; did you mean \"", near, "\"?")));
    }
  }

  int64_t bytes(int p) const {
    const ParamInfo& info = split_.tree.params[p];
    return info.param.numel() * dtype_bytes(compute_dtype(config_, info));
  }

  bool named(int m) const {
    return std::any_of(tiling_.modules.begin(), tiling_.modules.end(), [&](const auto& pattern) {
      return fnmatch(pattern.c_str(), module(m).name.c_str(), 0) == 0;
    });
  }

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
    throw ConfigError(concat("[engine::split_large] tiling: \"", split_.tree.params[p].name,
                             "\" also belongs to a module other than a plain nn.Linear or "
                             "nn.Embedding, which needs it whole"));
  }

  void tile(int p) {
    const ParamInfo info = split_.tree.params[p];
    const int64_t rows = info.param.size(0), row_bytes = bytes(p) / rows;
    const int64_t limit = tiling_.max_bytes > 0 ? tiling_.max_bytes : bytes(p);
    if (row_bytes > limit) {
      throw ConfigError(concat("[engine::split_large] \"tiling.max_bytes\" is ", limit,
                               ", less than one row of \"", info.name, "\", which has ", row_bytes,
                               " bytes"));
    }
    const int64_t most = limit / row_bytes;
    const int64_t count = (rows + most - 1) / most;
    Tiled tiled;
    tiled.name = info.name;
    tiled.whole = info.param;
    tiled.index = p;
    const int owner = users_[p].front();
    for (const int m : users_[p]) std::erase(split_.tree.modules[m].params, p);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t begin = i * rows / count, end = (i + 1) * rows / count;
      tiled.first.push_back(begin);
      const std::string name = concat(info.name, "[", begin, ":", end, "]");
      at::Tensor part = info.param.detach().narrow(0, begin, end - begin).detach();
      part.set_requires_grad(info.param.requires_grad());
      split_.tree.modules.push_back(
          {name, "Tile", owner, {static_cast<int>(split_.tree.params.size())}});
      split_.tree.params.push_back({name, part, info.group, p});
    }
    tiled.first.push_back(rows);
    split_.tiled.push_back(std::move(tiled));
  }

  const Config& config_;
  const TilingConfig& tiling_;
  Split split_;
  std::vector<std::vector<int>> users_;  // modules that own each parameter
};

}  // namespace

Split split_large(const ModelTree& tree, const Config& config) {
  if (!config.tiling.any()) return {tree, {}};
  return Splitter(tree, config).run();
}

}  // namespace engine

// ---- the user's parameter

void Core::State::let_wholes_go() {
  for (engine::Tiled& one : tiled) {
    engine::own_storage(one.whole, tile_flat(one, 0).dtype);
    detach_whole(one);
  }
}

void Core::State::detach_whole(engine::Tiled& one) {
  c10::StorageImpl* storage = one.whole.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(c10::DataPtr(nullptr, storage->device()));
  exec::set_guard(*storage,
                  concat("[engine::tiling] parameter \"", one.name, "\" is in ", one.units.size(),
                         " tiles, and its values are not here as a whole. Read it inside `with "
                         "engine.gathered():`, or keep its module out of \"tiling.modules\"."));
  one.gathered.reset();
}

exec::Flat& Core::State::tile_flat(const engine::Tiled& one, size_t tile) {
  return executor->units()[one.units[tile]].flats.front();
}

// Tiles into `to`, or `from` into them: whole rows, in the dtype they compute in.
void Core::State::copy_rows(const engine::Tiled& one, char* whole, bool to_tiles) {
  for (size_t tile = 0; tile < one.units.size(); ++tile) {
    const exec::Flat& flat = tile_flat(one, tile);
    auto* part = static_cast<char*>(flat.slots.front().param.data_ptr());
    const int64_t bytes = flat.slots.front().numel * flat.element_bytes();
    char* at = whole + one.first[tile] * one.columns() * flat.element_bytes();
    std::memcpy(to_tiles ? part : at, to_tiles ? at : part, bytes);
  }
}

std::map<int, at::Tensor> Core::State::whole_values(
    bool only_trainable, std::vector<std::pair<std::string, at::Tensor>>* tensors) {
  std::map<int, at::Tensor> rows;
  for (const engine::Tiled& one : tiled) {
    if (only_trainable && !tile_flat(one, 0).trainable) continue;
    const at::Tensor whole = at::empty(one.whole.sizes(), at::TensorOptions(at::kFloat));
    tensors->emplace_back(one.name, whole);
    for (size_t tile = 0; tile < one.units.size(); ++tile) {
      rows[one.units[tile]] = whole.narrow(0, one.first[tile], one.rows(tile));
    }
  }
  return rows;
}

void Core::State::split_rows(std::map<std::string, at::Tensor>& by_name) {
  for (const engine::Tiled& one : tiled) {
    const auto given = by_name.find(one.name);
    if (given == by_name.end()) continue;
    const at::Tensor value = given->second;
    if (value.sizes() != one.whole.sizes()) {
      throw ConfigError(concat("[engine::set_grads] \"", one.name, "\" has shape ", value.sizes(),
                               ", its parameter ", one.whole.sizes()));
    }
    by_name.erase(given);
    for (size_t tile = 0; tile < one.units.size(); ++tile) {
      by_name[unit_names[one.units[tile]]] = value.narrow(0, one.first[tile], one.rows(tile));
    }
  }
}

void Core::State::return_rows(int unit) {
  for (engine::Tiled& one : tiled) {
    const auto found = std::find(one.units.begin(), one.units.end(), unit);
    if (found == one.units.end()) continue;
    if (!one.returned.defined()) {
      one.returned = at::empty(one.whole.sizes(), one.whole.options().requires_grad(false));
    }
    const size_t tile = found - one.units.begin();
    one.returned.narrow(0, one.first[tile], one.rows(tile))
        .copy_(tile_flat(one, tile).slots.front().param.detach());
    if (++one.num_returned == one.units.size()) one.whole.set_data(one.returned);
  }
}

bool Core::State::any_in(const engine::Tiled& one, const std::vector<int>& units) const {
  return std::any_of(units.begin(), units.end(), [&](int unit) {
    return std::find(one.units.begin(), one.units.end(), unit) != one.units.end();
  });
}

void Core::State::gather_wholes(const std::vector<int>& units) {
  for (engine::Tiled& one : tiled) {
    if (one.gathered || !any_in(one, units)) continue;
    one.gathered =
        tiers.device.take(static_cast<int64_t>(one.whole.nbytes()), mem::Account::kParam);
    copy_rows(one, one.gathered.data(), false);
    c10::StorageImpl* storage = one.whole.storage().unsafeGetStorageImpl();
    storage->set_data_ptr_noswap(c10::DataPtr(one.gathered.data(), storage->device()));
    exec::clear_guard(*storage);
  }
}

void Core::State::release_wholes(const std::vector<int>& units, bool write) {
  for (engine::Tiled& one : tiled) {
    if (!one.gathered || !any_in(one, units)) continue;
    if (write) copy_rows(one, one.gathered.data(), true);
    detach_whole(one);
  }
}

}  // namespace penstock
