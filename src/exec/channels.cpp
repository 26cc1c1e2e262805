#include "src/exec/channels.h"

#include <string>

#include "src/base/text.h"

namespace penstock::exec {

// A channel's name is part of every tag, so each set of stages has its own name. See [Note:
// Channels of a pipeline].
Channels::Channels(const Groups& groups, const Mesh& mesh, Group& peers,
                   const std::vector<UnitState>& units)
    : gather(peers, "gather"), reduce(peers, "reduce"), control(peers, "control"), groups_(groups) {
  if (mesh.size(Axis::kPipeline) == 1) return;
  stage_.emplace(peers, "stage");
  pipeline_.emplace(peers, "stages");
  for (const UnitState& unit : units) {
    for (const Flat& flat : unit.flats) {
      if (!flat.placement.is_partial(Axis::kPipeline)) continue;
      const std::vector<int>& stages = flat.placement.on(Axis::kPipeline).holders;
      std::string name = "tied";
      for (const int stage : stages) name += concat(" ", stage);
      tied_.try_emplace(stages, peers, name,
                        holders(flat.placement, Axis::kPipeline, mesh, peers.rank()));
    }
  }
}

// All ranks connect in the order of the map's keys, so no ranks wait for each other in a circle.
void Channels::connect_tied(Group& peers, c10::Device device) {
  for (auto& [stages, tied] : tied_) {
    tied.channel.use(tied.ranks, peers.connect_on_device(tied.ranks.ranks, device));
  }
}

Channels::Addends Channels::addends(const Flat& flat, Axis axis) {
  if (axis != Axis::kPipeline) return {stage(), groups_.of({axis})};
  Tied& tied = tied_.at(flat.placement.on(axis).holders);
  return {tied.channel, tied.ranks};
}

template <class Action>
void Channels::for_each(const Action& action) {
  for (comm::Channel* channel : {&gather, &reduce, &control}) action(*channel);
  if (stage_) action(*stage_);
  if (pipeline_) action(*pipeline_);
  for (auto& [stages, tied] : tied_) action(tied.channel);
}

int64_t Channels::exchanges() {
  int64_t sum = 0;
  for_each([&](const comm::Channel& channel) { sum += channel.exchanges(); });
  return sum;
}

void Channels::record(const std::shared_ptr<trace::Recorder>& recorder) {
  for_each([&](comm::Channel& channel) { channel.recorder = recorder; });
}

void Channels::set_step(int64_t step) {
  for_each([&](comm::Channel& channel) { channel.set_step(step); });
}

void Channels::renew() {
  for_each([](comm::Channel& channel) { channel.renew(); });
}

}  // namespace penstock::exec
