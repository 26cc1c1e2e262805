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
#include <string>
#include <utility>
#include <vector>

#include "penstock/group.h"
#include "src/comm/channel.h"
#include "src/exec/flat.h"
#include "src/place/groups.h"
#include "src/place/mesh.h"

namespace penstock::exec {

class Channels {
 public:
  // `groups` must outlive this object.
  Channels(const Groups& groups, const Mesh& mesh, Group& peers,
           const std::vector<UnitState>& units);
  // [all ranks] Connects the ranks whose stages share weights, so that they can sum gradients on
  // that device.
  void connect_tied(Group& peers, c10::Device device);

  comm::Channel gather, reduce;  // used by the lanes with these names
  comm::Channel control;         // collectives of all ranks, on the model's thread

  // Returns the channel of this stage's ranks, or `control` if there is one stage.
  comm::Channel& stage() { return stage_ ? *stage_ : control; }
  // Returns the channel of the ranks of one pipeline. Requires several stages.
  comm::Channel& pipeline() { return *pipeline_; }
  // The ranks that hold a flat along one axis, and the channel on which they add up its gradient.
  struct Addends {
    comm::Channel& channel;
    const Members& ranks;
  };
  // Requires a flat that is partial over the axis.
  Addends addends(const Flat& flat, Axis axis);

  int64_t exchanges();  // number of exchanges with peers so far, over all channels
  void record(const std::shared_ptr<trace::Recorder>& recorder);
  void set_step(int64_t step);
  void renew();  // must follow Group::renew()

 private:
  template <class Action>
  void for_each(const Action& action);

  struct Tied {
    Tied(Group& peers, const std::string& name, Members stages)
        : channel(peers, name), ranks(std::move(stages)) {}
    comm::Channel channel;
    const Members ranks;
  };
  const Groups& groups_;
  std::optional<comm::Channel> stage_, pipeline_;  // unset if there is one stage
  std::map<std::vector<int>, Tied> tied_;          // keyed by the stages that hold the weights
};

}  // namespace penstock::exec
