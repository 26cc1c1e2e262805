#pragma once
// TokenCaches: the keys and values of cached tokens, which rest on another tier ([Note: Caches]).
#include <memory>

#include "penstock/core.h"
#include "src/activations/layer_caches.h"

namespace penstock {

// A view of a core, for the model's thread.
class PENSTOCK_API TokenCaches {
 public:
  explicit TokenCaches(const Core& core) : state_(core.state_) {}

  // Returns whether the table moves cached tokens. If not, make() must not be called.
  bool moves() const;
  // Returns an empty cache of one attention layer. `window`: see activations::LayerCache.
  std::shared_ptr<activations::LayerCache> make(int64_t window);
  // Adds tokens, and returns all to which they attend. In a forward they belong to the unit that
  // computes. Throws as LayerCache::add(), and RuntimeFault after close().
  activations::LayerCache::Pair add(const std::shared_ptr<activations::LayerCache>& cache,
                                    const activations::LayerCache::Pair& made);

 private:
  std::shared_ptr<Core::State> state_;
};

}  // namespace penstock
