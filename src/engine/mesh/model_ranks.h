#pragma once
// ModelRanks: the ranks that compute one model with this one: those of the tensor axis, with the
// modules that they have cut, those with parts of the same sequences, and the stages of a pipeline.
// Compute thread only.
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "penstock/tensor_ranks.h"
#include "src/engine/mesh/stage_lanes.h"
#include "src/exec/flat.h"
#include "src/parallel/tensor_operators.h"
#include "src/parallel/tensor_rules.h"
#include "src/place/mesh.h"

namespace penstock::engine {

class TensorAxis {
 public:
  // `ruled`: of this tree. `here`: its params that this rank's stage has.
  TensorAxis(const std::shared_ptr<Group>& group, const Mesh& mesh,
             const std::vector<parallel::Ruled>& ruled, const ModelTree& tree,
             const std::set<int>& here);

  const std::vector<TensorModule>& modules() const { return modules_; }
  parallel::Peers& peers() { return *peers_; }
  // Who computes that module, which is being called.
  parallel::OperatorPeers ranks_of(const TensorModule& how);
  // For an exchange of that name.
  parallel::OperatorPeers all(const std::string& name) const { return {peers_, name}; }
  // Before an update of `units`. Throws RuntimeFault where nobody has called a module that is cut
  // before the first: who reads its weight in another way computes with a part as if it were all.
  // Of what several stages have, each may leave it to others: there a gradient tells who reads it.
  void check_called(const std::vector<exec::UnitState>& units) const;

  parallel::Replicated replicated;

 private:
  std::shared_ptr<parallel::Peers> peers_;
  std::vector<TensorModule> modules_;
  std::vector<comm::Label> labels_;       // of the modules' exchanges
  std::vector<std::vector<int>> params_;  // of the modules
  // By param of which no module was called yet: one of them.
  std::map<int, size_t> uncalled_;
};

// Who computes one model with this rank.
struct ModelRanks {
  std::optional<TensorAxis> tensor;           // where mesh.tensor > 1
  std::shared_ptr<parallel::Peers> sequence;  // where mesh.sequence > 1
  std::optional<StageLanes> stages;           // where mesh.pipeline > 1

  void set_step(int64_t step);
  void record(const std::shared_ptr<trace::Recorder>& recorder);
  // Why there are messages under way that nobody waits for, or nothing.
  std::string cut_short() const;
  void close();
  // What their exchanges threw since the last call; null: nothing.
  std::exception_ptr take_fault();
};

}  // namespace penstock::engine
