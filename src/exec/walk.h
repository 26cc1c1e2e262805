#pragma once
// Walk: buffers on their way along a route, from copy to copy. One function per kind of pass; the
// buffers of all travel together, so a fused step is one exchange.
#include <ATen/core/Tensor.h>

#include <vector>

#include "src/comm/channel.h"
#include "src/mem/tiers.h"
#include "src/place/groups.h"
#include "src/plan/route.h"

namespace penstock::exec {

// One buffer's way. Memory is the caller's and stays until the walk has ended.
struct Travel {
  device::Address from, to;
  Dtype first = Dtype::kFp32, last = Dtype::kFp32;
  int64_t numel = 0;           // of the whole flat
  bool adds = false;           // to what is at `to`
  mem::DiskTicket arriving{};  // the read into `from`
  // Where not null and Walk::counts_squares(): the sum of squares of this rank's own part of what
  // is at `to` in the end, with the bits of host::sum_squares ([Note: Squares]).
  // Where a device made it, it is a scalar there.
  double* squares = nullptr;
  at::Tensor* squares_there = nullptr;
};

class Walk {
 public:
  // Mesh, groups and tiers outlive it. `on_host`: all of it in host memory, whatever the tiers are.
  Walk(Route route, const Mesh& mesh, const Groups& groups, mem::Tiers& tiers,
       bool on_host = false);
  void add(const Travel& travel) { travels_.push_back(travel); }
  // Takes from the arenas what stands between the passes, what is received and what is packed.
  // After the last add(); run() does it, on its own thread, where the caller has not.
  void ready();

  // The passes from `first` on. One thread; the channel is that lane's.
  void run(comm::Channel& channel, const comm::Label& label, size_t first = 0);
  void let_go() { leases_.clear(); }  // what ready() took; after run()
  const Route& route() const { return route_; }
  // Whether the last pass makes the sums of squares.
  bool counts_squares() const;

 private:
  device::Address input(size_t travel, size_t pass) const;
  Dtype dtype_before(const Travel& travel, size_t pass) const;
  Dtype dtype_after(const Travel& travel, size_t pass) const;
  int64_t numel_at(const Travel& travel, const Placement& place) const;
  bool adds_here(const Travel& travel, size_t pass) const;
  const device::Device* owner(Tier tier) const { return on_host_ ? nullptr : tiers_.owner(tier); }
  bool host_reads(size_t pass) const;
  bool sums_elsewhere(const Travel& travel, size_t pass) const;
  comm::Staging staging_of(size_t pass) const;
  void count_squares(size_t pass) const;
  device::Address scratch(Tier tier, int64_t bytes);
  void lay_out(size_t travel);
  int64_t lay_out_collective(size_t pass);
  void local(size_t pass) const;
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
  std::vector<std::vector<comm::GatherBuffer>> gathers_;  // by pass, then by travel
  std::vector<std::vector<comm::ReduceBuffer>> reduces_;
  comm::Staging staging_;  // of one pass after the other
  const bool on_host_;
  std::vector<mem::Lease> leases_;
  bool ready_ = false;
};

}  // namespace penstock::exec
