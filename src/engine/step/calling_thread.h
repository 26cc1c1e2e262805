#pragma once
// CallingThread: records which thread is in a call of the engine. An engine has one state, so while
// one thread is in a forward, a backward or a step, such a call from any other thread is refused.
// Usable from any thread.
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace penstock::engine {

class CallingThread {
 public:
  // Takes the operating system's id of a thread and returns the thread's name. The name is "" for a
  // thread of autograd, which no caller started.
  using Name = std::function<std::string(int64_t)>;

  void name_by(Name name) { name_ = std::move(name); }

  // Begins a call, which may be nested in an earlier call of this thread. Throws RuntimeFault if
  // another thread is in a call.
  void enter(const std::string& call);
  void leave();
  // Calls enter(). The returned object calls leave() when it is destroyed.
  [[nodiscard]] std::shared_ptr<void> within(const std::string& call);
  // Returns whether the last refused call was this thread's, and forgets the refusal if so.
  bool take_refused();
  // Begins a backward. It ends with leave_backward(), or when autograd frees the returned object.
  std::shared_ptr<void> enter_backward();
  void leave_backward();

 private:
  struct Holder {
    std::string call;
    int64_t thread = 0;
  };

  Holder holder() const;  // the call that is in progress now, and its thread
  template <class Begin>
  void begin_call(const std::string& call, const Begin& begin);

  Name name_ = [](int64_t thread) { return std::to_string(thread); };
  std::mutex mutex_;  // guards the members below
  std::vector<std::string> calls_;
  int64_t thread_ = 0;               // the thread of these calls
  int64_t refused_ = 0;              // the thread that was refused last
  std::weak_ptr<int64_t> backward_;  // the thread of the backward
};

}  // namespace penstock::engine
