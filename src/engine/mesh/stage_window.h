#pragma once
// StageWindow: what this rank of a pipeline computes in a window, action by action. Used only by
// the model's thread.
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "src/engine/mesh/stage_split.h"
#include "src/engine/model/units.h"
#include "src/engine/step/split_backward.h"
#include "src/place/groups.h"
#include "src/plan/model_desc.h"
#include "src/plan/pipeline_schedule.h"

namespace penstock::engine {

class StageWindow {
 public:
  // [pipeline] `members`: the ranks of this rank's pipeline. `specs`: the model's units.
  StageWindow(const Members& members, const Stages& stages, const std::vector<UnitSpec>& specs,
              const ParallelConfig& config);

  int index() const { return index_; }
  const std::vector<int>& stages() const { return own_; }  // of this rank, in ascending order
  // Returns the actions of all ranks for `num_micro` micro-batches. An evaluation (`trains` is
  // false) has only the forwards of the schedule "gpipe". Throws ConfigError if the schedule does
  // not allow this number.
  Schedule schedule(int num_micro, bool trains) const;
  // Returns the model with the visits of this rank's stages, stage by stage. The root and the units
  // in `spanning` have visits in every stage.
  ModelDesc by_stage(ModelDesc model, const std::vector<int>& spanning) const;

  // Begins a window. Returns true if it trains and its schedule differs from that of the last
  // training window.
  bool begin(const Schedule& schedule, bool trains);
  // The schedule of the last training window. Before the first one, it has no ranks.
  const Schedule& trained() const { return trained_; }

  // One of this rank's actions.
  struct StageTurn {
    int number = 0;  // in the window
    int stage = 0;
    bool trains = false;  // the window trains
  };
  // Begins `action`. Throws RuntimeFault if it is not the window's next action.
  void start(const Action& action);
  // Returns the action in progress if it has this direction. Otherwise, and outside of windows,
  // returns nothing.
  std::optional<StageTurn> now(bool forward) const;
  // Returns whether the action in progress computes only the gradients of the stage's inputs.
  bool only_inputs() const;
  // Returns whether the action in progress computes with the unit. The modules of other stages are
  // called, too, and return stand-ins. Returns true outside of windows.
  bool computes(int unit) const;
  // Keeps the graph of a split backward from its first part to its second one.
  void keep(const Action& inputs, SplitBackward split);
  SplitBackward take(const Action& weights);
  void end() { actions_.clear(); }

 private:
  const int index_, num_ranks_, virtual_stages_;
  const std::string schedule_;
  std::vector<int> own_;
  std::vector<std::vector<int>> stages_of_;  // by unit: the stages of this rank that visit it
  Schedule trained_;
  std::vector<Action> actions_;
  std::map<std::pair<int, int>, SplitBackward> splits_;  // by stage and micro-batch
  size_t begun_ = 0;                                     // actions that began
  bool trains_ = false;
};

}  // namespace penstock::engine
