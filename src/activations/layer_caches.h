#pragma once
// LayerCaches: keys and values of cached tokens, on another tier while their layer does not
// compute. The table's cell `cache rest` sets the tier and the dtype.
//
// [Note: Chunks of tokens] A layer's keys are at rest in chunks of equally many tokens, so that
// each forward moves all earlier tokens to the device and only new tokens away. The tokens after
// the last complete chunk stay on the device. The same holds for values. A unit's forward needs all
// tokens in one tensor, which is assembled from the chunks and freed when the forward has ended. If
// attention has a window, chunks that it has passed are freed.
//
// The plan calls bring() before the preceding unit computes, and put_away() when the unit's forward
// has ended. bring() brings what the unit's last forward used. If this forward uses another cache,
// add() itself fetches the tokens; the only effect is that the forward takes longer.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "penstock/export.h"
#include "src/activations/shelf.h"

namespace penstock::activations {

// The keys and values of the tokens that one attention layer has cached, each of the shape [batch,
// heads, tokens, size]. Only the model's thread may use this object.
class PENSTOCK_API LayerCache {
 public:
  struct Pair {
    at::Tensor keys, values;
  };

  // `rest`: a dtype that is not quantized means that of the tokens. `window`: each token attends to
  // itself and the window - 1 tokens before it; 0: to all tokens before it.
  LayerCache(std::shared_ptr<Shelf> shelf, Dtype rest, int64_t window);
  ~LayerCache();
  LayerCache(const LayerCache&) = delete;
  LayerCache& operator=(const LayerCache&) = delete;

  int64_t tokens() const { return tokens_; }  // also those that left the window
  int64_t batch() const { return batch_; }
  // Adds tokens, and returns all tokens to which they attend. The result is read-only. Throws
  // ConfigError if the shapes, dtypes or devices do not fit those of earlier tokens, or if a
  // backward could follow.
  Pair add(const Pair& made);
  // Frees the tensors of add(), and moves complete chunks to the shelf.
  void put_away();
  // Frees the memory of chunks that were written to the disk. Returns whether nothing is left to
  // do.
  bool settle();
  // Starts to bring the chunks, or frees what was brought.
  void bring();
  void release();

  // Replaces the sequences by those with these indices, which may repeat: int64, [new batch]. After
  // an error, add() throws.
  void select(const at::Tensor& sequences);
  // Throws RuntimeFault if the next token would attend to tokens that have left the window.
  void remove_last(int64_t tokens);
  // From now on, tokens leave the window only in remove_last(), which can then remove all tokens
  // that were added after its last call.
  void keep_past() { keeps_past_ = true; }
  void clear();
  void close();  // clear(), and makes later calls of add() throw
  // Takes the tokens of another cache with the same window. After an error, add() throws.
  void copy(LayerCache& other);

 private:
  struct Side {  // keys or values
    std::vector<std::unique_ptr<Parked>> chunks;
    int64_t first = 0;           // number of chunks that left the window
    at::Tensor tail;             // tokens after the last complete chunk
    at::Tensor whole;            // all these tokens, from add() to put_away()
    int64_t whole_first = 0;     // the first token in `whole`
    std::vector<int64_t> shape;  // of one chunk
  };

  void check(const Pair& made) const;
  at::Tensor assemble(Side& side, const at::Tensor& made);
  at::Tensor seen(const at::Tensor& whole, int64_t first) const;
  void select_in(Side& side, const at::Tensor& chosen, int64_t chunk_tokens);
  template <class Change>
  void change(const Change& edit);
  void put_away(Side& side);
  void drop_passed(Side& side) const;
  int64_t first_needed() const;
  at::Tensor chunk(Side& side, size_t at);
  std::unique_ptr<Parked> park(const at::Tensor& chunk) const;

  const std::shared_ptr<Shelf> shelf_;
  const Dtype rest_;
  const int64_t window_;
  Side keys_, values_;
  at::TensorOptions options_;
  int64_t tokens_ = 0, batch_ = 0, chunk_tokens_ = 0;
  bool closed_ = false, keeps_past_ = false;
  bool broken_ = false;  // an error cut a change short
};

// The caches of all layers of one engine. Only the model's thread may use this object.
class LayerCaches {
 public:
  explicit LayerCaches(const Placement& rest,
                       const device::Device& computes = device::Device::host());

  // Call before make() if caches rest on disk.
  void open_disk(const mem::DiskOptions& options);
  // The caller owns the cache, which may outlive this object. `window`: see LayerCache. Throws
  // RuntimeFault after close().
  std::shared_ptr<LayerCache> make(int64_t window = 0);
  // Adds tokens that unit number `unit` computes. put_away(unit) must follow.
  LayerCache::Pair add(int unit, const std::shared_ptr<LayerCache>& cache,
                       const LayerCache::Pair& made);
  void bring(int unit);
  void put_away(int unit);
  // Puts away what the unit has added since its last put_away().
  void put_away_rest(int unit);
  void close();  // frees the tokens of all caches

  const Shelf& shelf() const { return *shelf_; }

 private:
  using Caches = std::vector<std::weak_ptr<LayerCache>>;

  const Dtype rest_;
  const std::shared_ptr<Shelf> shelf_;
  Caches made_;
  std::unordered_map<int, Caches> used_, adding_;  // by unit: in its last forward, in this forward
  Caches writing_;
  bool closed_ = false;
};

}  // namespace penstock::activations
