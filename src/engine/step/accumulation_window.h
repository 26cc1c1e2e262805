#pragma once
// AccumulationWindow: how far one optimizer step has come, from its first forward to its update.
// Pure. (No relative of a parameter's window into memory, [Note: Windows].) With `accumulate` = k
// it goes
//
//   idle -> forward seen -> backward armed -> 1 of k seen -> ... -> complete -> (update) idle
//                                 |
//                                 +-> dropped, since the backward threw -> forward seen
//
// Users leave this path where they may: several forwards, backwards after the last, a step that is
// forced. So a window is a set of facts, and the table in accumulation_window.cpp has a line for
// each call: what it needs, what it changes, and what it says where it is refused.
#include <cstdint>
#include <string>

namespace penstock::engine {

// What users and autograd do in a window, and what is asked of it.
enum class Call : uint8_t {
  kForward,        // that trains
  kBackward,       // engine.backward(loss), which scales the loss
  kBackwardBegin,  // autograd reached the first of the engine's hooks: the backward is armed
  kBackwardEnd,
  kFullGrads,
  kSetGrads,
  kStep,    // step(), which may find that the window is not complete
  kUpdate,  // and applies it: the next window begins
  kDrop,    // nothing of the window can be trusted
};

class AccumulationWindow {
 public:
  // `scales_loss`: a backward has to come through engine.backward(loss). `sees_forwards`: every
  // forward is told, so that a backward without one is an error.
  AccumulationWindow(int64_t accumulate, bool scales_loss, bool sees_forwards);

  const char* refusal(Call call) const;  // null when the call is legal now
  void check(Call call) const;           // throws RuntimeFault with the refusal
  void on(Call call);                    // checks the call and takes it in

  bool armed() const;     // a backward began and did not end
  bool complete() const;  // `accumulate` backwards ended
  // The backward that began last completes the window: it leaves gradients reduced.
  bool reduces() const { return reduces_; }
  int64_t accumulate() const { return accumulate_; }
  int64_t seen() const;          // backwards that ended
  int64_t num_averaged() const;  // over how many the step averages

  // The backward that began gave a gradient.
  void contribute() { contributed_ = true; }
  // By backward that ended: '1' if it gave one, else '0'.
  const std::string& gave() const { return gave_; }
  // Those of the first that gave none on any rank are none of the window. True if there were any.
  bool keep(const std::string& gave_anywhere);

  // The first contribution that is not finite, until it is taken or the window is dropped.
  void blame(const std::string& contribution);
  bool blamed() const { return !blamed_.empty(); }
  std::string take_blamed();

 private:
  uint8_t facts() const;

  int64_t accumulate_;
  uint8_t standing_;  // facts that no call takes away
  uint8_t facts_;
  std::string gave_;
  bool contributed_ = false;
  bool reduces_ = false;
  std::string blamed_;
};

}  // namespace penstock::engine
