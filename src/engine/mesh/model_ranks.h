#pragma once
// ModelRanks: the ranks that compute one model together with this rank. These are the tensor ranks
// (with the modules that they cut), the sequence ranks, and the ranks of a pipeline (with their
// stages). Used only by the model's thread.
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "src/engine/mesh/stage_lanes.h"
#include "src/engine/mesh/stage_window.h"
#include "src/engine/mesh/tensor_ranks.h"
#include "src/exec/flat.h"
#include "src/parallel/tensor_operators.h"
#include "src/parallel/tensor_rules.h"
#include "src/place/mesh.h"
#include "src/plan/model_desc.h"

namespace penstock::engine {

class TensorAxis {
 public:
  // `ruled`: the modules of `tree` that have a rule. `here`: indices of the parameters of this
  // rank's stage.
  TensorAxis(std::shared_ptr<parallel::Peers> peers, const std::vector<parallel::Ruled>& ruled,
             const ModelTree& tree, const std::set<int>& here);

  const std::vector<TensorModule>& modules() const { return modules_; }
  // Returns for each module the label of its exchanges and the indices of its parameters.
  std::vector<std::pair<comm::Label, std::vector<int>>> labels() const;
  // The cuts of all parameters whose cut is not kWhole, by name.
  const std::map<std::string, Cut>& cuts() const { return cuts_; }
  parallel::Peers& peers() { return *peers_; }
  // Returns the ranks that compute a module together. Must be called when the module is called.
  parallel::OperatorPeers ranks_of(const TensorModule& how);
  // Returns all tensor ranks for an exchange called `name`.
  parallel::OperatorPeers all(const std::string& name) const { return {peers_, name}; }
  // Must be called before an update of `units`. Throws RuntimeFault if a cut module was never
  // called: other code may then read the module's weight directly, and use the part as if it were
  // the full tensor. A module that several stages have needs a call in this stage only if its
  // weight has a gradient here.
  void check_called(const std::vector<exec::UnitState>& units) const;

  parallel::Replicated replicated;

 private:
  std::shared_ptr<parallel::Peers> peers_;
  std::vector<TensorModule> modules_;
  std::map<std::string, Cut> cuts_;
  std::vector<comm::Label> labels_;       // labels of the modules' exchanges
  std::vector<std::vector<int>> params_;  // parameters of the modules
  // Maps each parameter whose modules were not called yet to the index of one of these modules.
  std::map<int, size_t> uncalled_;
};

// The ranks of one sequence, in groups of neighbours. In attention, the ranks of a group exchange
// values, so that each rank has fewer heads but more tokens. The ranks that have the same place in
// their groups form a ring, around which keys and values travel.
class SequenceAxis {
 public:
  using Connect =
      std::function<std::shared_ptr<parallel::Peers>(const Members& ranks, const char* lane)>;
  SequenceAxis(Members ranks, Connect connect);

  // [all ranks] Called once. `num_neighbours`: ranks per group, a divisor of the number of ranks.
  void arrange(int num_neighbours);
  const std::shared_ptr<parallel::Peers>& all() const { return all_; }
  const std::shared_ptr<parallel::Peers>& neighbours() const;  // requires several ranks per group
  const std::shared_ptr<parallel::Peers>& ring() const;        // requires several groups
  std::vector<parallel::Peers*> peers() const;
  // Compares values, `text` and the exchanges on the device so far. Returns the first rank that
  // differs from the first rank of the sequence (< 0: none).
  int compare(const std::vector<at::Tensor>& values, const std::string& text) const;

 private:
  const Members ranks_;
  const Connect connect_;
  std::shared_ptr<parallel::Peers> all_;
  std::shared_ptr<parallel::Peers> neighbours_, ring_;  // null if it would have only one rank
};

// Each member is set only if its axis has several ranks.
struct ModelRanks {
  std::optional<TensorAxis> tensor;      // mesh.tensor > 1
  std::optional<SequenceAxis> sequence;  // mesh.sequence > 1
  std::optional<StageLanes> stages;      // mesh.pipeline > 1
  std::optional<StageWindow> window;     // mesh.pipeline > 1

  void set_step(int64_t step);
  void record(const std::shared_ptr<trace::Recorder>& recorder);
  // Called before each exchange that layers make with tensor or sequence ranks.
  using Watch = std::function<void(const LayerExchange& made, const comm::Label& label)>;
  void watch(Watch watch);
  void watch_new();  // must be called after peers were added
  // Returns an error text if a batch of the pipeline did not end, so that messages between stages
  // may still be in flight. Otherwise returns "".
  std::string cut_short() const;
  void close();
  // Returns the exception that an exchange of tensor or sequence ranks threw since the last call,
  // or null.
  std::exception_ptr take_fault();

 private:
  std::vector<parallel::Peers*> peers();

  Watch watch_;
};

}  // namespace penstock::engine
