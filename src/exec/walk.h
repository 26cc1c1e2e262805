#pragma once
// Walk: moves the buffers of a plan line along a route, each over the mesh of its flat.
#include <list>
#include <vector>

#include "src/exec/flat_mesh.h"
#include "src/exec/mesh_walk.h"

namespace penstock::exec {

class Walk {
 public:
  // A route depends on the mesh, but its kinds of passes and its placements do not.
  struct Order {
    Placement from;
    std::vector<Move> moves;
    bool consumes = true;  // see penstock::route()
    // All buffers are in host memory, whatever the tiers of the placements are.
    bool on_host = false;
  };
  // `run` (the mesh of the run) and `tiers` must outlive the walk.
  Walk(Order order, const FlatMesh& run, int rank, mem::Tiers& tiers);

  // `over`: the mesh of the buffer's flat. Must outlive the walk.
  void add(const FlatMesh& over, const Travel& travel);
  // Takes memory from the arenas: for values between passes, for received data and for packing.
  // Must follow the last add(). If the caller does not call ready(), run() calls it on its own
  // thread.
  void ready();

  // Returns whether the passes from `first` on may launch collectives on a device. Their line then
  // needs a turn ([Note: Launch order]).
  bool meets_on_device(size_t first = 0) const {
    return parts_.front().walk.meets_on_device(first);
  }
  // Runs the passes, beginning with pass `first`, on the calling thread: all passes of one mesh,
  // then those of the next mesh. `channel` must belong to that thread's lane. Leaves `turn`, if
  // there is one, after the last collective on a device.
  void run(comm::Channel& channel, const comm::Label& label, size_t first = 0,
           comm::LaunchTurn* turn = nullptr);
  void let_go();  // frees the memory of ready(); must follow run()
  const Route& route() const { return parts_.front().walk.route(); }

 private:
  struct OverMesh {
    const FlatMesh* over;
    MeshWalk walk;
    bool used = false;
  };
  OverMesh& part(const FlatMesh& over);

  const Order order_;
  const int rank_;
  mem::Tiers& tiers_;
  std::list<OverMesh> parts_;  // until ready(), the first is that of the run
  bool is_ready_ = false;
};

}  // namespace penstock::exec
