#pragma once
// Channels: the communication channels of a rank's lanes.
//
// [Note: Channels of a pipeline] The ranks of a channel make the same collectives on it in the same
// order. Stages hold different flats, so a stage makes collectives that other stages do not make.
// Such collectives run on three kinds of channel: one for the ranks of a stage, one for the ranks
// of a pipeline, and one for each set of stages that share tied weights. All other collectives run
// on the channels of all ranks.
#include <map>
#include <optional>
#include <vector>

#include "penstock/group.h"
#include "src/comm/channel.h"
#include "src/exec/flat.h"
#include "src/place/mesh.h"

namespace penstock::exec {

class Channels {
 public:
  Channels(const Mesh& mesh, Group& peers, const std::vector<UnitState>& units);

  comm::Channel gather, reduce;  // used by the lanes with these names
  comm::Channel control;         // collectives of all ranks, on the model's thread

  // Returns the channel of this stage's ranks, or `control` if there is one stage.
  comm::Channel& stage() { return stage_ ? *stage_ : control; }
  // Returns the channel of the ranks of one pipeline. Requires several stages.
  comm::Channel& pipeline() { return *pipeline_; }
  // Returns the channel of the stages that have this flat. Requires several owners.
  comm::Channel& across(const Flat& flat) { return tied_.at(flat.owners); }

  int64_t exchanges();  // number of exchanges with peers so far, over all channels
  void record(const std::shared_ptr<trace::Recorder>& recorder);
  void set_step(int64_t step);
  void renew();  // must follow Group::renew()

 private:
  template <class Action>
  void for_each(const Action& action);

  std::optional<comm::Channel> stage_, pipeline_;   // unset if there is one stage
  std::map<std::vector<int>, comm::Channel> tied_;  // keyed by the owners
};

}  // namespace penstock::exec
