#include "src/exec/walk.h"

#include <iterator>
#include <utility>

namespace penstock::exec {

Walk::Walk(Way way, const FlatMesh& run, int rank, mem::Tiers& tiers)
    : way_(std::move(way)), rank_(rank), tiers_(tiers) {
  part(run);
}

Walk::Part& Walk::part(const FlatMesh& over) {
  for (Part& known : parts_) {
    if (known.over == &over) return known;
  }
  Route route = penstock::route(way_.from, way_.moves, over.mesh, rank_, way_.consumes);
  return parts_.emplace_back(
      Part{&over, MeshWalk(std::move(route), over.mesh, over.groups, tiers_, way_.on_host)});
}

void Walk::add(const FlatMesh& over, const Travel& travel) {
  Part& found = part(over);
  found.used = true;
  found.walk.add(travel);
}

// All ranks drop the same parts, because their lines move the same flats. One part always stays:
// ranks also meet in a line without buffers.
void Walk::ready() {
  for (auto it = parts_.begin(); it != parts_.end();) {
    const bool drop = !it->used && parts_.size() > 1;
    it = drop ? parts_.erase(it) : std::next(it);
  }
  for (Part& part : parts_) part.walk.ready();
  is_ready_ = true;
}

void Walk::run(comm::Channel& channel, const comm::Label& label, size_t first,
               comm::LaunchTurn* turn) {
  if (!is_ready_) ready();
  for (Part& part : parts_) {
    part.walk.run(channel, label, first, turn, /*leaves=*/&part == &parts_.back());
  }
}

void Walk::let_go() {
  for (Part& part : parts_) part.walk.let_go();
}

}  // namespace penstock::exec
