#pragma once
// Streams: worker threads with queues, 25 per device, each started at its first use. Marks: the
// points that events have recorded. Any thread may call these functions; the current device and the
// current streams belong to the calling thread. `why` is the name under which a wait of the host is
// counted.
#include <c10/core/Stream.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>

namespace penstock::sim {

using Task = std::function<void()>;

// One recording of an event. It is set once, when the stream reaches it. Streams and events share
// it.
struct Mark {
  std::atomic<bool> done{false};
  std::chrono::steady_clock::time_point time;  // valid if `done`
};
using MarkPointer = std::shared_ptr<Mark>;

int current_device();
// Makes a context on the device, as cudaSetDevice() does since CUDA 12.
int exchange_device(int device);
void set_current_device(int device) noexcept;  // makes no context
// Switches this thread to the device and back, as work with an event of that device does. This
// makes contexts on both devices.
void visit_device(int device);

// Device -1 is the current device.
c10::Stream current_stream(int device = -1);
c10::Stream default_stream(int device);
c10::Stream exchange_stream(c10::Stream stream);

// Returns one of 16 streams of the device, or one of 8 of high priority, in turn. So two callers
// may get the same stream.
c10::Stream pool_stream(int device, bool high_priority);

// Queues a kernel, which is delayed. Its exception becomes the device's asynchronous error. `name`
// must stay valid until the kernel has run.
void launch(c10::Stream stream, const char* name, Task task);
// Queues the device's own work, which is not delayed.
void enqueue(c10::Stream stream, Task task);

MarkPointer record(c10::Stream stream);
void block(c10::Stream stream, MarkPointer mark);  // null: nothing was recorded
bool is_done(const MarkPointer& mark);
bool is_idle(c10::Stream stream);
void* native_handle(c10::Stream stream);

// These three throw the device's asynchronous error.
void synchronize(c10::Stream stream, const std::string& why);
void synchronize(int device, const MarkPointer& mark, const std::string& why);
void synchronize_device(int device, const std::string& why);

// These two also wait, but neither count the wait nor throw.
void drain(const MarkPointer& mark);
void drain_device(int device);

// Must be called when memory came from the system. Counts a wait of the host for all devices, and
// makes it if set_allocations_wait(true) was called. The caller must hold no lock that a stream or
// another thread may need.
void note_new_memory(const std::string& why);

void fail(int device, const std::string& error);
bool has_failed(int device);
void throw_if_failed(int device);

}  // namespace penstock::sim
