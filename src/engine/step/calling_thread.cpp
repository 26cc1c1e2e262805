#include "src/engine/step/calling_thread.h"

#include <sys/syscall.h>
#include <unistd.h>

#include "penstock/error.h"
#include "src/base/text.h"

namespace penstock::engine {

namespace {

int64_t this_thread() { return syscall(SYS_gettid); }

// A thread that ended inside a call left it without leave().
bool alive(int64_t thread) { return syscall(SYS_tgkill, getpid(), thread, 0) == 0; }

}  // namespace

CallingThread::Holder CallingThread::holder() const {
  if (!calls_.empty() && alive(thread_)) return {calls_.back(), thread_};
  if (const auto backward = backward_.lock()) return {"backward", *backward};
  return {};
}

// Runs `begin` under the lock if no other thread is in a call.
template <class Begin>
void CallingThread::begin_call(const std::string& call, const Begin& begin) {
  Holder other;
  {
    const std::lock_guard lock(mutex_);
    other = holder();
    if (other.thread == 0 || other.thread == this_thread()) return begin();
  }
  const std::string own = name_(this_thread());  // without the lock: it may wait for another thread
  const std::string theirs = name_(other.thread);
  if (!own.empty()) {
    {
      const std::lock_guard lock(mutex_);
      refused_ = this_thread();
    }
    throw RuntimeFault(concat("[engine::", call, "] thread ", own, " began a ", call, " while ",
                              theirs.empty() ? "autograd's thread" : "thread " + theirs,
                              " was in a ", other.call,
                              " of the same engine. Use the engine in only one thread at a time "
                              "(for example, with a lock around each iteration), or evaluate "
                              "copy.deepcopy(model) in the other thread"));
  }
  const std::lock_guard lock(mutex_);
  begin();
}

void CallingThread::enter(const std::string& call) {
  begin_call(call, [&] {
    if (thread_ != this_thread()) calls_.clear();
    thread_ = this_thread();
    // A call never nests in itself. If it is still listed, an interrupt has skipped its leave().
    if (calls_.empty() || calls_.back() != call) calls_.push_back(call);
  });
}

void CallingThread::leave() {
  const std::lock_guard lock(mutex_);
  if (thread_ == this_thread() && !calls_.empty()) calls_.pop_back();
}

std::shared_ptr<void> CallingThread::within(const std::string& call) {
  enter(call);
  return {nullptr, [this](void*) { leave(); }};
}

bool CallingThread::take_refused() {
  const std::lock_guard lock(mutex_);
  if (refused_ != this_thread()) return false;
  refused_ = 0;
  return true;
}

std::shared_ptr<void> CallingThread::enter_backward() {
  auto thread = std::make_shared<int64_t>(this_thread());
  begin_call("backward", [&] { backward_ = thread; });
  return thread;
}

void CallingThread::leave_backward() {
  const std::lock_guard lock(mutex_);
  backward_.reset();
}

}  // namespace penstock::engine
