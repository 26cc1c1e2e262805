#pragma once
// MeshWalk: moves buffers that are placed over one mesh along a route, from copy to copy. There is
// one function per kind of pass. Each pass moves all buffers together, in one exchange.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "src/comm/channel.h"
#include "src/comm/launch_order.h"
#include "src/exec/encoded_pass.h"
#include "src/mem/tiers.h"
#include "src/place/groups.h"
#include "src/plan/route.h"

namespace penstock::exec {

// One buffer of a walk. The caller owns the memory and keeps it until the walk has ended.
struct Travel {
  device::Address from, to;
  Dtype first = Dtype::kFp32, last = Dtype::kFp32;
  int64_t numel = 0;           // number of elements of the full flat
  bool adds = false;           // adds to the values at `to`
  mem::DiskTicket arriving{};  // the read into `from`
  // Receives the sum of squares of this rank's part of the final values at `to`, if it is not null
  // and Walk::counts_squares() is true. The sum has the same bits as the result of
  // host::sum_squares ([Note: Squares]). On a device, the square root of the sum goes to
  // `norm_there` as a device scalar.
  double* squares = nullptr;
  at::Tensor* norm_there = nullptr;
  uint64_t noise = 0;  // for sums by a lossy wire ([Note: Noise])
  // The residual of the addends of one pass, on any tier ([Note: Residuals]).
  struct Fed {
    device::Residual values{};
    size_t pass = SIZE_MAX;
    int64_t numel = 0;
    int64_t offset = 0;   // of the residual's first value among the addends
    float factor = 1.0F;  // of the residual in a sum without an encoding
    // Ranges of the encoded sum that belong to no parameter. A code that cannot encode zero leaves
    // values there, so they are set to zero.
    std::shared_ptr<const device::Residual::Ranges> gaps{};
  };
  Fed residual{};
};

class MeshWalk {
 public:
  // Mesh, groups and tiers must outlive the walk. `on_host`: all buffers are in host memory,
  // whatever the tiers of the route are.
  MeshWalk(Route route, const Mesh& mesh, const Groups& groups, mem::Tiers& tiers,
           bool on_host = false);
  void add(const Travel& travel) { travels_.push_back(travel); }
  // Takes memory from the arenas: for values between passes, for received data and for packing.
  // Must follow the last add(). If the caller does not call ready(), run() calls it on its own
  // thread.
  void ready();

  // Returns whether the passes from `first` on may launch collectives on a device. Their line then
  // needs a turn ([Note: Launch order]).
  bool meets_on_device(size_t first = 0) const { return last_on_device(first) > 0; }
  // Runs the passes, beginning with pass `first`, on the calling thread. `channel` must belong to
  // that thread's lane. `leaves`: leaves `turn`, if there is one, after the last collective on a
  // device.
  void run(comm::Channel& channel, const comm::Label& label, size_t first = 0,
           comm::LaunchTurn* turn = nullptr, bool leaves = true);
  void let_go() { leases_.clear(); }  // frees the memory of ready(); must follow run()
  const Route& route() const { return route_; }
  // Returns whether the last pass computes the sums of squares.
  bool counts_squares() const;

 private:
  device::Address input(size_t travel, size_t pass) const;
  Dtype dtype_before(const Travel& travel, size_t pass) const;
  Dtype dtype_after(const Travel& travel, size_t pass) const;
  int64_t numel_at(const Travel& travel, const Placement& place) const;
  bool adds_here(const Travel& travel, size_t pass) const;
  const device::Device* owner(Tier tier) const { return on_host_ ? nullptr : tiers_.owner(tier); }
  bool host_reads(size_t pass) const;
  size_t last_on_device(size_t first) const;
  bool sums_elsewhere(const Travel& travel, size_t pass) const;
  comm::Staging staging_of(size_t pass) const;
  void count_squares(size_t pass) const;
  device::Address scratch(Tier tier, int64_t bytes);
  void lay_out(size_t travel);
  int64_t lay_out_collective(size_t pass);
  void local(size_t pass) const;
  void add_encoded(size_t pass);
  void place_residuals();
  void bring_residuals(size_t pass) const;
  void return_residuals(size_t pass) const;
  void gather(size_t pass, comm::Channel& channel, const comm::Label& label);
  void reduce(size_t pass, comm::Channel& channel, const comm::Label& label);
  void arrive() const;

  const Route route_;
  const Mesh& mesh_;
  mem::Tiers& tiers_;
  std::vector<const Members*> members_;  // by pass
  std::vector<Travel> travels_;
  std::vector<std::vector<device::Address>> stops_;       // by travel, then by pass
  std::vector<device::Address> received_;                 // by travel
  std::vector<device::Residual> residuals_;               // by travel: in the memory of its sum
  std::vector<std::vector<comm::GatherBuffer>> gathers_;  // by pass, then by travel
  std::vector<std::vector<comm::ReduceBuffer>> reduces_;
  std::vector<EncodedPass> encoded_;           // by pass; without buffers if its wire is plain
  std::vector<device::Address> encoded_room_;  // by pass
  comm::Staging staging_;  // shared by the passes, which run one after the other
  const bool on_host_;
  std::vector<mem::Lease> leases_;
  bool ready_ = false;
};

}  // namespace penstock::exec
