#pragma once
// AccumulationWindow: the progress of one optimizer step, from its first forward to its update.
// Pure. (Windows of parameters into memory, [Note: Windows], are something else.) With `accumulate`
// = k the states are
//
//   idle -> forward seen -> backward armed -> 1 of k seen -> ... -> complete -> (update) idle
//                                 |
//                                 +-> dropped, since the backward threw -> forward seen
//
// Users may leave this path, for example by several forwards, more than k backwards, or a forced
// step. So a window is a set of facts. The table in accumulation_window.cpp has a row for each
// call. A row lists the facts that the call needs, the facts that it changes, and the error text
// for a refused call.
#include <cstdint>
#include <string>
#include <vector>

namespace penstock::engine {

// Calls of users and of autograd that change or need the state of a window.
enum class Call : uint8_t {
  kForward,        // a training forward
  kBackward,       // engine.backward(loss), which scales the loss
  kBackwardBegin,  // autograd reached the engine's first hook: the backward is armed
  kBackwardEnd,
  kFullGrads,
  kSetGrads,
  kStep,    // step() was called; the window may be incomplete
  kUpdate,  // step() applies the window, and the next window begins
  kDrop,    // the contributions of the window are discarded
};

class AccumulationWindow {
 public:
  // If `scales_loss` is set, every backward must go through engine.backward(loss). If
  // `sees_forwards` is set, every forward is reported, so a backward without a forward is an error.
  // `per_micro`: number of backwards that this rank runs for a micro-batch, one for each of its
  // stages.
  AccumulationWindow(int64_t accumulate, bool scales_loss, bool sees_forwards,
                     int64_t per_micro = 1);

  const char* refusal(Call call) const;  // the error text; null if the call is legal now
  void check(Call call) const;           // throws RuntimeFault with the error text
  void on(Call call);                    // checks the call and changes the facts

  bool armed() const;     // a backward began and has not ended
  bool complete() const;  // `accumulate` backwards ended
  // Returns whether the backward that began last completes the window and reduces the gradients.
  bool reduces() const { return reduces_; }
  int64_t accumulate() const { return accumulate_; }
  int64_t seen() const;          // backwards that ended
  int64_t num_averaged() const;  // backwards that the step averages over

  // Records that the current backward produced a gradient on this rank.
  void contribute() { contributed_ = true; }
  // Sets the micro-batch to which the last backward belongs. By default, each backward is a
  // micro-batch of its own.
  void set_micro(int64_t micro);
  // Returns whether the last backward that ended produced a gradient on this rank.
  bool gave() const { return !gave_.empty() && gave_.back() == '1'; }
  // Returns one character per backward of a full window, ordered by micro-batch. A '.' is a
  // backward that has not ended. A '1' means that some backward of the same micro-batch produced a
  // gradient on this rank; a '0' means that none did.
  std::string said() const;
  // Removes micro-batches that produced no gradient on any rank. `gave_anywhere` has the maximum of
  // each character of said() over all ranks. Returns true if any was removed.
  bool keep(const std::string& gave_anywhere);

  // Keeps the first contribution that is not finite, until it is taken or the window is dropped.
  void blame(const std::string& contribution);
  bool blamed() const { return !blamed_.empty(); }
  std::string take_blamed();

 private:
  uint8_t facts() const;

  int64_t accumulate_;
  uint8_t standing_;  // facts that no call clears
  uint8_t facts_;
  int64_t per_micro_;
  std::string gave_;             // for each backward that ended
  std::vector<int64_t> micros_;  // for each backward that ended
  int64_t next_micro_ = 0;
  bool contributed_ = false;
  bool reduces_ = false;
  std::string blamed_;
};

}  // namespace penstock::engine
