#pragma once
// [Note: Tiles] A weight that is too large to be gathered at once is split by rows. Each tile is a
// separate parameter in a separate unit; no module of the user holds it. The user's parameter
// remains as an object without memory. The operators in tiled_operators.cpp enter and leave a
// tile's unit at each use. So if a tied weight is used twice, it is gathered twice, and its
// gradient moves after each use.
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
  std::vector<int64_t> first;     // first row of each tile, then the weight's number of rows
  std::vector<at::Tensor> tiles;  // parameters; they have memory while their units are entered
  std::vector<int> units;         // unit of each tile
  bool trainable = false;         // requires_grad at the time of the split
  mem::Lease gathered;            // memory of `whole` inside gathered()
  at::Tensor returned;            // the values that `whole` gets at close()
  size_t num_returned = 0;        // number of tiles copied into `returned`

  int64_t rows(size_t tile) const { return first[tile + 1] - first[tile]; }
  // Name of the tile's parameter, module and unit: "head.weight[0:128]".
  std::string tile_name(size_t tile) const;
};

// The interface through which tiles call the engine. Called by the model's thread and, in a
// backward, by autograd's thread.
class Host {
 public:
  virtual ~Host() = default;
  // The tile's parameter has its values from enter_tile() to leave_tile(), in forward and in
  // backward. `in_backward`: the visit's mark in the backward.
  virtual void enter_tile(int unit) = 0;
  virtual void leave_tile(int unit, Mark in_backward) = 0;
  // Starts an operator's backward, which reads the weight if `uses` is true. Returns false inside
  // torch.autograd.grad(), where parameters get no gradients.
  virtual bool begin_tile_backward(bool uses) = 0;
  virtual void take_tile_gradient(int unit, const at::Tensor& gradient) = 0;
  // Runs a part of a backward and keeps the exception that it throws, because autograd passes on
  // only the exception's text.
  virtual void run_in_backward(const std::function<void()>& work) = 0;
};

// The tiled weights of one model. The engine owns this object, and operators keep it alive while
// they run. Only one thread at a time may use it.
class TiledWeights {
 public:
  // `host` must outlive this object. `unit_names` has a unit for every tile.
  TiledWeights(Host& host, std::vector<TiledWeight> weights,
               const std::vector<std::string>& unit_names);

  Host& host() const { return host_; }
  const TiledWeight& at(size_t index) const { return weights_.at(index); }
  const std::vector<TiledWeight>& all() const { return weights_; }
  // Returns the index in all(). Throws ConfigError if the parameter is not tiled.
  size_t index_of(const std::string& param) const;
  bool is_tile(int unit) const { return is_tile_.at(unit); }
  void check_open() const;  // throws RuntimeFault after close()
  // If the unit is a tile, returns the name of the user's parameter that contains it, and the index
  // of the tile's first element there. Otherwise returns `param` and 0.
  std::pair<std::string, int64_t> whole_of(int unit, const std::string& param) const;

  // Frees the user's parameters. Reading such a parameter afterwards throws an error that explains
  // this.
  void let_wholes_go();
  // Copies requires_grad of the user's parameters to their tiles.
  void follow_freezing();
  // Copies each weight that has a tile in these units from its tiles, which must have values, into
  // `memory`. These weights stay whole until release(), which copies them back to the tiles if
  // `write` is true.
  void gather(const std::vector<int>& units, mem::Arena& memory);
  void release(const std::vector<int>& units, bool write);

  // Adds to `tensors` an uninitialized tensor for each weight. Returns, for the unit of each tile,
  // the rows of these tensors that the tile must fill.
  std::map<int, at::Tensor> whole_values(
      bool only_trainable, const at::TensorOptions& options,
      std::vector<std::pair<std::string, at::Tensor>>* tensors) const;
  // Replaces each tiled weight in `by_name` with its tiles. Throws ConfigError for a wrong shape.
  void split_rows(std::map<std::string, at::Tensor>& by_name) const;

  // Ends all use: operators throw afterwards. Then call return_rows() for the unit of every tile:
  // it gives the storages of the user's parameters their own memory again.
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
