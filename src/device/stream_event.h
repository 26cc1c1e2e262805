#pragma once
// StreamEvent: a point in the work that is queued on a stream of a device. Other streams and the
// host can wait for it. Events are reused: CUDA takes some microseconds to make and to free an
// event, and a step of the engine needs several events per unit.
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

namespace penstock::device {

// Usable from any thread whose current device is the stream's device ([Note: Contexts]). Move-only.
class StreamEvent {
 public:
  // Marks the end of the work that is queued on `stream` so far. Throws the device's errors.
  explicit StreamEvent(const c10::Stream& stream);
  ~StreamEvent();  // a later StreamEvent reuses the device's event
  StreamEvent(StreamEvent&& other) noexcept;
  StreamEvent& operator=(StreamEvent&& other) noexcept;

  void block(const c10::Stream& stream) const;  // later work of `stream` waits for the event
  void synchronize() const;                     // the host waits
  bool query() const;                           // whether all work before the event is done

 private:
  c10::Event event_;
  bool owns_ = true;
};

}  // namespace penstock::device
