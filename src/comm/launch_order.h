#pragma once
// LaunchOrder: makes the lanes of a rank launch their device collectives in the order of the plan.
//
// [Note: Launch order] Each lane has communicators of its own, and threads of their own may launch
// on them. NCCL requires that all ranks launch the collectives of all communicators in one order.
// Otherwise each device may wait for a collective that the other device starts only later. The
// model's thread takes a turn for each line with device collectives, when it submits the line, and
// all ranks submit the same lines in the same order. A lane launches the line's collectives after
// all earlier turns were left.
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>

namespace penstock::comm {

class LaunchOrder {
 public:
  // The destructor leaves the turn, so the turn of a line that never runs blocks nobody. A turn may
  // outlive its order.
  class Turn {
   public:
    ~Turn() { leave(); }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

    void wait();   // blocks until all earlier turns were left
    void leave();  // must follow the line's last launch

   private:
    friend class LaunchOrder;
    struct State {
      std::mutex mutex;
      std::condition_variable changed;
      std::set<int64_t> open;  // numbers of turns that were not left; guarded by mutex
      int64_t next = 0;        // guarded by mutex
    };
    Turn(std::shared_ptr<State> state, int64_t number)
        : state_(std::move(state)), number_(number) {}

    const std::shared_ptr<State> state_;
    const int64_t number_;
  };

  std::shared_ptr<Turn> next();  // any thread

 private:
  const std::shared_ptr<Turn::State> state_ = std::make_shared<Turn::State>();
};

}  // namespace penstock::comm
