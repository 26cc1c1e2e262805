#include "src/tiles/weights.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/device/kernels.h"
#include "src/device/torch_compat.h"

namespace penstock::tiles {

std::string TiledWeight::tile_name(size_t tile) const {
  return concat(name, "[", first[tile], ":", first[tile + 1], "]");
}

TiledWeights::TiledWeights(Host& host, std::vector<TiledWeight> weights,
                           const std::vector<std::string>& unit_names)
    : host_(host), weights_(std::move(weights)), is_tile_(unit_names.size(), false) {
  for (TiledWeight& one : weights_) {
    for (size_t tile = 0; tile < one.tiles.size(); ++tile) {
      const std::string name = one.tile_name(tile);
      const auto found = std::find(unit_names.begin(), unit_names.end(), name);
      PENSTOCK_ASSERT(found != unit_names.end(), concat("no unit ", name));
      one.units.push_back(static_cast<int>(found - unit_names.begin()));
      is_tile_[one.units.back()] = true;
    }
  }
}

size_t TiledWeights::index_of(const std::string& param) const {
  const auto found = std::find_if(weights_.begin(), weights_.end(),
                                  [&](const TiledWeight& one) { return one.name == param; });
  if (found != weights_.end()) return found - weights_.begin();
  throw ConfigError(concat("[tiles::index_of] parameter \"", param, "\" is not tiled"));
}

std::pair<std::string, int64_t> TiledWeights::whole_of(int unit, const std::string& param) const {
  for (const TiledWeight& one : weights_) {
    for (size_t tile = 0; tile < one.units.size(); ++tile) {
      if (one.units[tile] != unit) continue;
      return {one.name, one.first[tile] * (one.tiles[tile].numel() / one.rows(tile))};
    }
  }
  return {param, 0};
}

void TiledWeights::check_open() const {
  if (closed_) throw RuntimeFault("[tiles::check_open] the engine is closed");
}

namespace {

std::string elsewhere(const TiledWeight& one) {
  return concat("[tiles::detach] parameter \"", one.name, "\" is in ", one.tiles.size(),
                " tiles, and its whole value is not in memory. Read it inside `with "
                "engine.gathered():`, or keep its module out of \"tiling.modules\".");
}

}  // namespace

void TiledWeights::let_wholes_go() {
  for (TiledWeight& one : weights_) detach(one, elsewhere(one));
}

void TiledWeights::detach(TiledWeight& one, const std::string& why) {
  // Frees the parameter's memory. The guard makes a read throw `why`.
  c10::StorageImpl* storage = one.whole.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(c10::DataPtr(nullptr, storage->device()));
  device::set_guard(*storage, why);
  one.gathered.reset();
}

void TiledWeights::follow_freezing() {
  for (const TiledWeight& one : weights_) {
    for (const at::Tensor& tile : one.tiles) tile.set_requires_grad(one.whole.requires_grad());
  }
}

bool TiledWeights::any_in(const TiledWeight& one, const std::vector<int>& units) const {
  return std::any_of(units.begin(), units.end(), [&](int unit) {
    return std::find(one.units.begin(), one.units.end(), unit) != one.units.end();
  });
}

namespace {

// Copies all rows from the tiles to `whole`, or back, in the compute dtype.
void copy_rows(const TiledWeight& one, device::Address whole, bool to_tiles) {
  for (const at::Tensor& tile : one.tiles) {
    const auto bytes = static_cast<int64_t>(tile.nbytes());
    const device::Address part(tile.data_ptr(), whole.device);
    device::copy(to_tiles ? part : whole, to_tiles ? whole : part, bytes);
    whole = whole + bytes;
  }
}

}  // namespace

void TiledWeights::gather(const std::vector<int>& units, mem::Arena& memory) {
  for (TiledWeight& one : weights_) {
    if (one.gathered || !any_in(one, units)) continue;
    // The lease owns the memory; the storage only points to it.
    one.gathered = memory.take(static_cast<int64_t>(one.whole.nbytes()), mem::Account::kParam);
    copy_rows(one, one.gathered.data(), false);
    c10::StorageImpl* storage = one.whole.storage().unsafeGetStorageImpl();
    storage->set_data_ptr_noswap(c10::DataPtr(one.gathered.data().data, storage->device()));
    device::clear_guard(*storage);
  }
}

void TiledWeights::release(const std::vector<int>& units, bool write) {
  for (TiledWeight& one : weights_) {
    if (!one.gathered || !any_in(one, units)) continue;
    if (write) copy_rows(one, one.gathered.data(), true);
    detach(one, elsewhere(one));
  }
}

std::map<int, at::Tensor> TiledWeights::whole_values(
    bool only_trainable, const at::TensorOptions& options,
    std::vector<std::pair<std::string, at::Tensor>>* tensors) const {
  std::map<int, at::Tensor> rows;
  for (const TiledWeight& one : weights_) {
    if (only_trainable && !one.trainable) continue;
    const at::Tensor whole = at::empty(one.whole.sizes(), options);
    tensors->emplace_back(one.name, whole);
    for (size_t tile = 0; tile < one.tiles.size(); ++tile) {
      rows[one.units[tile]] = whole.narrow(0, one.first[tile], one.rows(tile));
    }
  }
  return rows;
}

void TiledWeights::split_rows(std::map<std::string, at::Tensor>& by_name) const {
  for (const TiledWeight& one : weights_) {
    const auto given = by_name.find(one.name);
    if (given == by_name.end()) continue;
    const at::Tensor value = given->second;
    if (value.sizes() != one.whole.sizes()) {
      throw ConfigError(concat("[tiles::split_rows] \"", one.name, "\" has shape ", value.sizes(),
                               ", but its parameter has ", one.whole.sizes()));
    }
    by_name.erase(given);
    for (size_t tile = 0; tile < one.tiles.size(); ++tile) {
      by_name[one.tile_name(tile)] = value.narrow(0, one.first[tile], one.rows(tile));
    }
  }
}

void TiledWeights::close() {
  closed_ = true;
  for (TiledWeight& one : weights_) {
    detach(one, concat("[tiles::close] parameter \"", one.name,
                       "\" has no values: the engine that kept them was closed without gathering "
                       "them"));
  }
}

void TiledWeights::return_rows(int unit) {
  for (TiledWeight& one : weights_) {
    const auto found = std::find(one.units.begin(), one.units.end(), unit);
    if (found == one.units.end()) continue;
    if (!one.returned.defined()) {
      one.returned = at::empty(one.whole.sizes(), one.whole.options().requires_grad(false));
    }
    const size_t tile = found - one.units.begin();
    // Tiles return one by one. The parameter gets its values when the last tile has returned.
    one.returned.narrow(0, one.first[tile], one.rows(tile)).copy_(one.tiles[tile].detach());
    if (++one.num_returned < one.tiles.size()) continue;
    // The parameter keeps its storage object, so the user's views of it stay valid.
    c10::StorageImpl* storage = one.whole.storage().unsafeGetStorageImpl();
    c10::StorageImpl* filled = one.returned.storage().unsafeGetStorageImpl();
    storage->set_data_ptr_noswap(filled->set_data_ptr(c10::DataPtr(nullptr, storage->device())));
    device::clear_guard(*storage);
    storage->set_allocator(filled->allocator());
    storage->set_resizable(true);
    one.returned.reset();
  }
}

}  // namespace penstock::tiles
