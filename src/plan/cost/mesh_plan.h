#pragma once
// Comparison of meshes: tensor x pipeline x data ranks of a cluster, for a transformer that need
// not exist yet. Plain values, usable from any thread.
#include <cstdint>
#include <string>
#include <vector>

#include "penstock/plan.h"

namespace penstock {

// Properties of a transformer that its parameters do not show.
struct TransformerShape {
  int64_t layers = 1, hidden = 1, heads = 1, sequence = 1, vocabulary = 0;
};

struct MeshQuestion {
  PlanQuestion asked;  // mesh, batch and tokens of its config are ignored
  TransformerShape shape;
  int nodes = 1, per_node = 1;
  int64_t batch = 1;              // samples per step over all ranks
  std::vector<int64_t> micro{1};  // sizes to try, in samples per micro-batch and data rank
};

struct PENSTOCK_API MeshAlternative {
  std::string precision{};  // empty: the model's own dtypes
  int tensor = 1, pipeline = 1, data = 1;
  int node = 1;  // number of nodes over which the data ranks of a stage are spread
  int virtual_stages = 1;
  int64_t micro = 1, accumulate = 1;
  bool recompute = false;
  // Cost of the largest stage for one tensor rank. Byte counts cover only the training state.
  // Seconds cover this stage alone, without the other stages.
  Alternative state;
  int64_t params = 0;       // parameters of this stage and tensor rank
  int64_t activations = 0;  // peak bytes, an estimate
  // Seconds of one step. `seconds` = state.seconds + messages (between stages) + bubble.
  // state.seconds = compute + again (recomputation) + sums (over tensor ranks) + data_waits.
  double seconds = 0, compute = 0, again = 0, sums = 0, messages = 0, data_waits = 0, bubble = 0;
  bool fits = true;
  std::string over{};          // "device 1.50 GiB over"
  int64_t excess = 0;          // bytes over the limits
  std::string why() const;     // one sentence
  std::string config() const;  // JSON, for penstock.initialize
};

struct MeshReport {
  std::vector<MeshAlternative> alternatives;  // those that fit come first, sorted by seconds
  std::string text;  // the ten best, and the best alternative for each remaining mesh
};

// Throws ConfigError if no mesh can divide the batch evenly.
PENSTOCK_API MeshReport mesh_report(const ModelTree& tree, const MeshQuestion& question);

}  // namespace penstock
