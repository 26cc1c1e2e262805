#include "src/engine/step/token_caches.h"

#include "penstock/error.h"
#include "src/engine/step/core_state.h"

namespace penstock {

bool TokenCaches::moves() const { return moves_caches(state_->executor->table()); }

std::shared_ptr<activations::LayerCache> TokenCaches::make(int64_t window) {
  return state_->executor->caches().make(window);
}

activations::LayerCache::Pair TokenCaches::add(
    const std::shared_ptr<activations::LayerCache>& cache,
    const activations::LayerCache::Pair& made) {
  if (state_->driver->section()) {
    return state_->executor->caches().add(state_->driver->computing(), cache, made);
  }
  activations::LayerCache::Pair all = cache->add(made);
  cache->put_away();
  return all;
}

}  // namespace penstock
