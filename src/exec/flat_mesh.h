#pragma once
// FlatMeshes: the meshes over which a rank's flats are placed ([Note: Expert ranks]).
#include <algorithm>
#include <list>
#include <vector>

#include "src/exec/flat.h"
#include "src/place/groups.h"

namespace penstock::exec {

// A mesh over which flats are placed, and this rank's groups on it.
struct FlatMesh {
  FlatMesh(const Mesh& given, int rank) : mesh(given), groups(given, rank) {}
  const Mesh mesh;
  const Groups groups;
};

class FlatMeshes {
 public:
  FlatMeshes(const std::vector<UnitState>& units, const Mesh& run, int rank) {
    all_.emplace_back(run, rank);
    for (const UnitState& unit : units) {
      for (const Flat& flat : unit.flats) add(flat.placement.mesh(run), rank);
      for (const Flat& flat : unit.away) add(flat.placement.mesh(run), rank);
    }
  }

  const FlatMesh& run() const { return all_.front(); }
  const FlatMesh& of(const Flat& flat) const {
    if (all_.size() == 1) return run();
    const Mesh own = flat.placement.mesh(run().mesh);
    return *std::find_if(all_.begin(), all_.end(),
                         [&](const FlatMesh& one) { return one.mesh == own; });
  }
  // Returns this rank's groups on the mesh that has the axis; on the mesh of the run if none has.
  const Groups& along(Axis axis) const {
    const auto found = std::find_if(all_.begin(), all_.end(),
                                    [&](const FlatMesh& one) { return one.mesh.size(axis) > 1; });
    return (found == all_.end() ? run() : *found).groups;
  }
  const std::list<FlatMesh>& all() const { return all_; }

 private:
  void add(const Mesh& mesh, int rank) {
    const auto is_known = [&](const FlatMesh& one) { return one.mesh == mesh; };
    if (std::none_of(all_.begin(), all_.end(), is_known)) all_.emplace_back(mesh, rank);
  }

  std::list<FlatMesh> all_;  // the mesh of the run first
};

}  // namespace penstock::exec
