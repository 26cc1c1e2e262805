#include "src/exec/channels.h"

#include <string>

#include "src/base/text.h"

namespace penstock::exec {

// A channel's name is part of every tag, so each set of owners has its own name. See [Note:
// Channels of a pipeline].
Channels::Channels(const Mesh& mesh, Group& peers, const std::vector<UnitState>& units)
    : gather(peers, "gather"), reduce(peers, "reduce"), control(peers, "control") {
  if (mesh.size(Axis::kPipeline) == 1) return;
  stage_.emplace(peers, "stage");
  pipeline_.emplace(peers, "stages");
  for (const UnitState& unit : units) {
    for (const Flat& flat : unit.flats) {
      if (flat.owners.size() < 2) continue;
      std::string name = "tied";
      for (const int owner : flat.owners) name += concat(" ", owner);
      tied_.try_emplace(flat.owners, peers, name);
    }
  }
}

template <class Action>
void Channels::for_each(const Action& action) {
  for (comm::Channel* channel : {&gather, &reduce, &control}) action(*channel);
  if (stage_) action(*stage_);
  if (pipeline_) action(*pipeline_);
  for (auto& [owners, channel] : tied_) action(channel);
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
