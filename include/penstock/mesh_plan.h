#pragma once
// Which mesh: tensor x pipeline x data ranks of a cluster, compared for a transformer before there
// is one. Values; any thread.
#include <cstdint>
#include <string>
#include <vector>

#include "penstock/plan.h"

namespace penstock {

// Of a transformer, what its parameters do not tell.
struct TransformerShape {
  int64_t layers = 1, hidden = 1, heads = 1, sequence = 1, vocabulary = 0;
};

struct MeshQuestion {
  PlanQuestion asked;  // its config's mesh, batch and tokens are not looked at
  TransformerShape shape;
  int nodes = 1, per_node = 1;
  int64_t batch = 1;              // samples of a step, of all ranks
  std::vector<int64_t> micro{1};  // samples of a micro-batch and data rank, to be tried
};

struct PENSTOCK_API MeshAlternative {
  std::string precision{};  // empty: as the model was built
  int tensor = 1, pipeline = 1, data = 1;
  int node = 1;  // nodes that the data ranks of a stage are in
  int virtual_stages = 1;
  int64_t micro = 1, accumulate = 1;
  bool recompute = false;
  // Of the stage that takes most. Its bytes are those of state, its seconds those of the stage
  // alone with one tensor rank's part: computing, collectives over data ranks and the update.
  Alternative state;
  int64_t params = 0;       // of that stage and tensor rank
  int64_t activations = 0;  // bytes at the peak, an estimate
  // Of a step. `seconds` is the sum: alone, what is computed again, sums, messages, bubble.
  double seconds = 0, compute = 0, again = 0, sums = 0, messages = 0, data_waits = 0, bubble = 0;
  bool fits = true;
  std::string over{};          // "device 1.50 GiB over"
  int64_t excess = 0;          // bytes of it
  std::string why() const;     // one sentence
  std::string config() const;  // JSON, for penstock.initialize
};

struct MeshReport {
  std::vector<MeshAlternative> alternatives;  // best first: what fits, of these the fastest
  std::string text;                           // the first ten, and the best of each other mesh
};

// Throws ConfigError: a batch that no mesh can share out.
PENSTOCK_API MeshReport mesh_report(const ModelTree& tree, const MeshQuestion& question);

}  // namespace penstock
