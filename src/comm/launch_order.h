#pragma once
// LaunchOrder: makes the lanes of a device launch their collectives in the order of the plans.
//
// [Note: Launch order] Each lane has its own communicators, and a lane may have its own thread.
// NCCL requires that all ranks launch the collectives of all communicators in one order. Otherwise
// each device may wait for a collective that the other device starts only later. When the model's
// thread submits a line with device collectives, it takes a turn for the line. A lane launches a
// line's collectives when all earlier turns were left. A launch does not block, because
// initialize() has connected the communicators. All engines that a process has on a device share
// its turns, so the turns are kept by device. Messages between stages take no turns (StageLanes).
// Ranks submit their lines in one order, with exceptions: if a parameter gets no gradient on one
// rank only, that rank submits the unit's reduction, and the later ones, at the end of the backward
// if the unit's parameters do not move, or if the unit runs several times in a forward (or in
// torch's reentrant checkpoint).
#include <c10/core/Device.h>

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>

namespace penstock::comm {

// The turns that were taken and not left yet.
struct OpenTurns {
  std::mutex mutex;
  std::condition_variable changed;
  std::set<int64_t> numbers;  // guarded by mutex
  int64_t next = 0;           // guarded by mutex
};

// One line's turn. The destructor leaves it, so the turn of a line that never runs blocks nobody. A
// turn may outlive its order.
class LaunchTurn {
 public:
  LaunchTurn(std::shared_ptr<OpenTurns> open, int64_t number)
      : open_(std::move(open)), number_(number) {}
  ~LaunchTurn() { leave(); }
  LaunchTurn(const LaunchTurn&) = delete;
  LaunchTurn& operator=(const LaunchTurn&) = delete;

  void wait();   // blocks until all earlier turns were left
  void leave();  // must follow the line's last launch

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
