#pragma once
// Tensors that users hold while the engine owns the memory: parameters, and the shards that a
// user's optimizer updates. When the engine ends, they get their own memory, or no memory ([Note:
// Windows]).
#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

namespace penstock::engine {

// Gives the parameter's storage its own memory with `values` (any dtype, same number of elements).
// Views of the parameter share this storage.
void own_values(const at::Tensor& param, const at::Tensor& values);

// [Note: Lent shards] A user's optimizer has this rank's fp32 shards in its parameter groups. The
// shards have memory only inside step() and inside a call of Values::change_shards(), which
// publishes what the optimizer wrote. At any other time, reading or writing a shard raises an
// error, so no edit can stay on one rank only or fail to reach the parameters.
class LentShards {
 public:
  void add(const std::string& name, const at::Tensor& master);
  bool empty() const { return shards_.empty(); }
  void show();  // gives the shards their memory
  void hide();
  // Throws RuntimeFault if the optimizer gave a shard new memory (`p.data = x`).
  void check() const;
  void take_back();  // hides the shards forever and forgets them

 private:
  struct LentShard {
    std::string name;
    at::Tensor master;
    c10::Storage window;
    void* memory;
  };
  std::vector<LentShard> shards_;
};

// Frees the tensors and clears the list. Reading one of the tensors afterwards raises an error.
void take_back(std::vector<at::Tensor>& lent);

}  // namespace penstock::engine
