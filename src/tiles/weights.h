#pragma once
// [Note: Tiles] A weight that is too large to be gathered at once is split by rows. Each tile is a
// parameter of its own in a unit of its own, which no module of the user's holds; the user's
// parameter stays where it is, as an object without memory. A tile's unit is entered and left at
// each use by the operators in tiled_operators.cpp, so a weight that is used twice (tied) is
// gathered twice, and its gradient moves after each use.
#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "src/mem/arena.h"
#include "src/plan/model_desc.h"

namespace penstock::tiles {

struct TiledWeight {
  std::string name;
  at::Tensor whole;               // the user's parameter
  std::vector<int64_t> first;     // row of each tile, and the number of rows
  std::vector<at::Tensor> tiles;  // parameters; their memory comes and goes with their units
  std::vector<int> units;         // of each tile
  bool trainable = false;         // when it was split
  mem::Lease gathered;            // memory of `whole` inside gathered()
  at::Tensor returned;            // what `whole` gets at close()
  size_t num_returned = 0;        // tiles that are in it

  int64_t rows(size_t tile) const { return first[tile + 1] - first[tile]; }
  // Of the tile's parameter, module and unit: "head.weight[0:128]".
  std::string tile_name(size_t tile) const;
};

// What tiles ask of the engine around them. Called by the thread that runs the model, and in a
// backward by autograd's.
class Host {
 public:
  virtual ~Host() = default;
  // The tile's parameter has its values from enter() to leave(), in forward and in backward.
  // `in_backward` says what a backward leaves behind.
  virtual void enter_tile(int unit) = 0;
  virtual void leave_tile(int unit, Mark in_backward) = 0;
  // An operator's backward begins. False in a torch.autograd.grad(), which takes no gradients.
  virtual bool begin_tile_backward() = 0;
  virtual void take_tile_gradient(int unit, const at::Tensor& gradient) = 0;
  // Runs a part of a backward and keeps what it throws: autograd passes on its text alone.
  virtual void run_in_backward(const std::function<void()>& work) = 0;
};

// The weights of one model that are in tiles. Owned by the engine; operators keep it alive while
// they run. Not for several threads at once.
class TiledWeights {
 public:
  // `host` outlives this object. `unit_names` has a unit for every tile.
  TiledWeights(Host& host, std::vector<TiledWeight> weights,
               const std::vector<std::string>& unit_names);

  Host& host() const { return host_; }
  const TiledWeight& at(size_t index) const { return weights_.at(index); }
  const std::vector<TiledWeight>& all() const { return weights_; }
  // Its place in all(). Throws ConfigError when it is not tiled.
  size_t index_of(const std::string& param) const;
  bool is_tile(int unit) const { return is_tile_.at(unit); }
  void check_open() const;  // throws RuntimeFault after close()
  // Of a unit's parameter: the user's that it is rows of, and its first element there; else itself.
  std::pair<std::string, int64_t> whole_of(int unit, const std::string& param) const;

  // The user's parameters have no values from here on; reading them says so.
  void let_wholes_go();
  // Tiles train or not as the user's parameters do now.
  void follow_freezing();
  // The weights of these units are whole (copied from their tiles, which must have values) until
  // release(), which with `write` copies them back.
  void gather(const std::vector<int>& units, mem::Arena& memory);
  void release(const std::vector<int>& units, bool write);

  // Tensors for the weights, among `tensors` by name; where each tile's unit writes.
  std::map<int, at::Tensor> whole_values(
      bool only_trainable, const at::TensorOptions& options,
      std::vector<std::pair<std::string, at::Tensor>>* tensors) const;
  // Replaces values of weights by those of their tiles. Throws ConfigError for a wrong shape.
  void split_rows(std::map<std::string, at::Tensor>& by_name) const;

  // The end: operators refuse to run. return_rows() of each tile then gives the user's parameters
  // (their storages) memory of their own again.
  void close();
  void return_rows(int unit);

 private:
  void detach(TiledWeight& one, const std::string& why);
  bool any_in(const TiledWeight& one, const std::vector<int>& units) const;

  Host& host_;
  std::vector<TiledWeight> weights_;
  std::vector<bool> is_tile_;  // by unit
  bool closed_ = false;
};

}  // namespace penstock::tiles
