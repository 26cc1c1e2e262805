#include "src/exec/walk.h"

#include <iterator>
#include <utility>

namespace penstock::exec {

Walk::Walk(Order order, const FlatMesh& run, int rank, mem::Tiers& tiers)
    : order_(std::move(order)), rank_(rank), tiers_(tiers) {
  part(run);
}

Walk::OverMesh& Walk::part(const FlatMesh& over) {
  for (OverMesh& known : parts_) {
    if (known.over == &over) return known;
  }
  Route route = penstock::route(order_.from, order_.moves, over.mesh, rank_, order_.consumes);
  return parts_.emplace_back(
      OverMesh{&over, MeshWalk(std::move(route), over.mesh, over.groups, tiers_, order_.on_host)});
}

void Walk::add(const FlatMesh& over, const Travel& travel) {
  OverMesh& found = part(over);
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
  for (OverMesh& part : parts_) part.walk.ready();
  is_ready_ = true;
}

void Walk::run(comm::Channel& channel, const comm::Label& label, size_t first,
               comm::LaunchTurn* turn) {
  if (!is_ready_) ready();
  for (OverMesh& part : parts_) {
    part.walk.run(channel, label, first, turn, /*leaves=*/&part == &parts_.back());
  }
}

void Walk::let_go() {
  for (OverMesh& part : parts_) part.walk.let_go();
}

}  // namespace penstock::exec
