#pragma once
// Channels: what a rank's lanes exchange on.
//
// [Note: Channels of a pipeline] The ranks of a channel make the same collectives on it in the same
// order. Stages differ in what they have, so what only one of them does has a channel beside what
// everyone does, and so has each set of stages with tied weights.
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

  comm::Channel gather, reduce;  // of the lanes of these names
  comm::Channel control;         // of what everyone does together

  // Of what the ranks of this stage do together; control where there is one stage.
  comm::Channel& stage() { return stage_ ? *stage_ : control; }
  // Of what each rank of a pipeline does with it; there are several stages.
  comm::Channel& pipeline() { return *pipeline_; }
  // Of the stages that have this flat; there are several of them.
  comm::Channel& across(const Flat& flat) { return tied_.at(flat.owners); }

  int64_t exchanges();
  void record(const std::shared_ptr<trace::Recorder>& recorder);
  void set_step(int64_t step);
  void renew();  // after the group's

 private:
  template <class Action>
  void for_each(const Action& action);

  std::optional<comm::Channel> stage_, pipeline_;   // where there are several
  std::map<std::vector<int>, comm::Channel> tied_;  // by owners
};

}  // namespace penstock::exec
