#pragma once
// Streams: worker threads with queues, 25 a device, each started when it is first used. Marks: what
// an event has recorded. Any thread may call any of it; the current device and the current streams
// are the calling thread's. Functions that may block the host take the name to count it under.
#include <c10/core/Stream.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>

namespace penstock::sim {

using Task = std::function<void()>;

// One recording of an event: set once, when the stream gets there. Streams and events share it.
struct Mark {
  std::atomic<bool> done{false};
  std::chrono::steady_clock::time_point time;  // valid when done
};
using MarkPointer = std::shared_ptr<Mark>;

int current_device();
// Makes a context there, as cudaSetDevice() does since CUDA 12.
int exchange_device(int device);
void set_current_device(int device) noexcept;  // makes none
// Work with an event of that device switches this thread there and back, which makes contexts.
void visit_device(int device);

// Device -1 is the current one.
c10::Stream current_stream(int device = -1);
c10::Stream default_stream(int device);
c10::Stream exchange_stream(c10::Stream stream);

// Round robin over 16 streams of the device, or over 8 of high priority: two may be one.
c10::Stream pool_stream(int device, bool high_priority);

// Queues a kernel: delayed, and its exception becomes the device's asynchronous error. `name` must
// outlive the call of the task.
void launch(c10::Stream stream, const char* name, Task task);
// Queues the device's own work, which takes no time.
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

// Waits as well, but neither counts nor throws.
void drain_device(int device);

void fail(int device, const std::string& error);
bool has_failed(int device);
void throw_if_failed(int device);

}  // namespace penstock::sim
