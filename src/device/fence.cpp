#include "src/device/fence.h"

namespace penstock::device {

// The trace records only this wait; waits for the device's half are not recorded.
void Fence::wait_for_host_half() const {
  std::unique_lock lock(state_->mutex);
  if (state_->done) return;
  const trace::Span waits(state_->recorder.get(), trace::Kind::kWait, state_->line, state_->flow,
                          state_->row);
  state_->changed.wait(lock, [this] { return state_->done; });
}

void Fence::wait() const {
  if (!state_) return;
  wait_for_host_half();
  try {  // also after an error, because earlier work may still use memory that the caller frees
    if (state_->queued) state_->queued->block(state_->device->current());
  } catch (const std::exception&) {
    if (!state_->error) throw;
  }
  if (state_->error) std::rethrow_exception(state_->error);
}

void Fence::wait_on_host() const {
  if (!state_) return;
  wait_for_host_half();
  if (state_->error) std::rethrow_exception(state_->error);
  if (state_->queued) state_->queued->synchronize();
}

void Fence::settle() const {
  if (!state_) return;
  wait_for_host_half();
  if (state_->queued) state_->queued->synchronize();
}

void Fence::set(const std::exception_ptr& error) const {
  const std::lock_guard lock(state_->mutex);
  state_->done = true;
  state_->error = error;
  state_->changed.notify_all();
}

}  // namespace penstock::device
