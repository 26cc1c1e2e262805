#pragma once
// LaunchOrder: makes the lanes of a device launch their collectives in the order of the plans.
//
// [Note: Launch order] Each lane has its own communicators, and a lane may have its own thread.
// NCCL requires that all ranks launch the collectives of all communicators in the same order.
// Otherwise two devices may each wait for a collective that the other device starts only later. So
// when the model's thread submits a plan line with device collectives, it takes a turn for the
// line. A lane launches the collectives of a line once all earlier turns have ended. A launch
// does not block, because initialize() has connected the communicators. All engines that a process
// has on a device share the device's turns. Messages between stages take no turns (StageLanes).
// All ranks submit their lines in the same order, except in one case: a parameter gets no gradient
// on one rank only, and its unit either has parameters that do not move, or runs several times in a
// forward (or in torch's reentrant checkpoint). That rank then submits the unit's reduction, and
// the later ones, only at the end of the backward.
#include <c10/core/Device.h>

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>

namespace penstock::comm {

// The turns that have been taken and not yet left.
struct OpenTurns {
  std::mutex mutex;
  std::condition_variable changed;
  std::set<int64_t> numbers;  // guarded by mutex
  int64_t next = 0;           // guarded by mutex
};

// The turn of one plan line. The destructor leaves the turn, so a line that never runs does not
// block other lines. A turn may outlive its LaunchOrder.
class LaunchTurn {
 public:
  LaunchTurn(std::shared_ptr<OpenTurns> open, int64_t number)
      : open_(std::move(open)), number_(number) {}
  ~LaunchTurn() { leave(); }
  LaunchTurn(const LaunchTurn&) = delete;
  LaunchTurn& operator=(const LaunchTurn&) = delete;

  void wait();   // blocks until all earlier turns have been left
  void leave();  // must be called after the line's last launch

 private:
  const std::shared_ptr<OpenTurns> open_;
  const int64_t number_;
};

class LaunchOrder {
 public:
  explicit LaunchOrder(c10::Device device);
  std::shared_ptr<LaunchTurn> next();  // any thread

 private:
  const std::shared_ptr<OpenTurns> open_;  // of the device
};

}  // namespace penstock::comm
