#include "src/device/stream_event.h"

#include <exception>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace penstock::device {

namespace {

// A pool of unused events. The process has only one pool, because events belong to devices and not
// to engines. The pool is never freed, because its process may end after the devices.
class UnusedEvents {
 public:
  static UnusedEvents& get() {
    static auto* const unused = new UnusedEvents;
    return *unused;
  }

  c10::Event take(c10::Device device) {
    const std::lock_guard lock(mutex_);
    std::vector<c10::Event>& events = events_[device];
    if (events.empty()) return c10::Event(device.type());
    c10::Event event = std::move(events.back());
    events.pop_back();
    return event;
  }

  void give_back(c10::Event event) {
    const std::lock_guard lock(mutex_);
    events_[event.device()].push_back(std::move(event));
  }

 private:
  std::mutex mutex_;
  std::unordered_map<c10::Device, std::vector<c10::Event>> events_;
};

}  // namespace

StreamEvent::StreamEvent(const c10::Stream& stream)
    : event_(UnusedEvents::get().take(stream.device())) {
  event_.record(stream);
}

StreamEvent::~StreamEvent() {
  if (!owns_) return;
  try {
    UnusedEvents::get().give_back(std::move(event_));
  } catch (const std::exception&) {  // no memory: the event is freed
  }
}

StreamEvent::StreamEvent(StreamEvent&& other) noexcept
    : event_(std::move(other.event_)), owns_(std::exchange(other.owns_, false)) {}

StreamEvent& StreamEvent::operator=(StreamEvent&& other) noexcept {
  std::swap(event_, other.event_);
  std::swap(owns_, other.owns_);
  return *this;
}

void StreamEvent::block(const c10::Stream& stream) const { event_.block(stream); }

void StreamEvent::synchronize() const { event_.synchronize(); }

bool StreamEvent::query() const { return event_.query(); }

}  // namespace penstock::device
