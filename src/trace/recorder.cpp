#include "src/trace/recorder.h"

#include <algorithm>
#include <chrono>

namespace penstock::trace {

namespace {

// All recorders of the process share these. Scopes set them and restore the old values.
thread_local int16_t row_of_thread = Recorder::kModel;
thread_local Text line_of_thread;

}  // namespace

// Returns the name of the kind, which is the category ("cat") of its events in a trace.
const char* name_of(Kind kind) {
  constexpr std::array<const char*, kNumKinds> kNames = {"compute", "line",  "exchange", "wait",
                                                         "read",    "write", "step"};
  return kNames[static_cast<size_t>(kind)];
}

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

Recorder::Recorder(int64_t kept)
    : kept_(kept), rows_{"model", "disk"}, sums_(rows_.size()), waited_(rows_.size()) {
  ring_.reserve(static_cast<size_t>(kept));
}

int16_t Recorder::row(const std::string& name) {
  const std::lock_guard lock(mutex_);
  const auto found = std::find(rows_.begin(), rows_.end(), name);
  const auto index = static_cast<int16_t>(found - rows_.begin());
  if (found == rows_.end()) {
    rows_.push_back(name);
    sums_.emplace_back();
    waited_.emplace_back();
  }
  return index;
}

std::vector<std::string> Recorder::rows() const {
  const std::lock_guard lock(mutex_);
  return rows_;
}

int16_t Recorder::set_row_here(int16_t row) { return std::exchange(row_of_thread, row); }
int16_t Recorder::row_here() { return row_of_thread; }
Text Recorder::set_line_here(Text line) { return std::exchange(line_of_thread, std::move(line)); }
const Text& Recorder::line_here() { return line_of_thread; }

void Recorder::add(Event event) {
  if (!on()) return;
  event.step = step();
  Text before;  // the overwritten text, freed after the lock is released
  const std::lock_guard lock(mutex_);
  sums_[static_cast<size_t>(event.row)][static_cast<size_t>(event.kind)].add(event);
  if (event.kind == Kind::kWait && event.row == kModel) {
    waited_[static_cast<size_t>(event.of)].add(event);
  }
  if (records_) {
    if (static_cast<int64_t>(recorded_.size()) < kMostRecorded) {
      recorded_.push_back(event);
    } else {
      ++dropped_;
    }
  }
  if (static_cast<int64_t>(ring_.size()) < kept_) {
    ring_.push_back(std::move(event));
  } else {
    before = std::move(ring_[next_].text);
    ring_[next_] = std::move(event);
  }
  next_ = (next_ + 1) % static_cast<size_t>(kept_);
}

EventSum Recorder::sum(int16_t row, Kind kind) const {
  const std::lock_guard lock(mutex_);
  return sums_.at(static_cast<size_t>(row))[static_cast<size_t>(kind)];
}

EventSum Recorder::waited_for(int16_t row) const {
  const std::lock_guard lock(mutex_);
  return waited_.at(static_cast<size_t>(row));
}

EventSum Recorder::sum(Kind kind) const {
  const std::lock_guard lock(mutex_);
  EventSum total;
  for (const auto& row : sums_) {
    const EventSum& one = row[static_cast<size_t>(kind)];
    total.count += one.count;
    total.bytes += one.bytes;
    total.ns += one.ns;
  }
  return total;
}

void Recorder::record() {
  const std::lock_guard lock(mutex_);
  records_ = true;
  recorded_.clear();
  dropped_ = 0;
}

std::vector<Event> Recorder::end_record() {
  const std::lock_guard lock(mutex_);
  records_ = false;
  return std::exchange(recorded_, {});
}

// `next_` is the oldest event once the ring is full.
std::vector<Event> Recorder::last() const {
  const std::lock_guard lock(mutex_);
  if (static_cast<int64_t>(ring_.size()) < kept_) return ring_;
  std::vector<Event> events(ring_.begin() + static_cast<std::ptrdiff_t>(next_), ring_.end());
  events.insert(events.end(), ring_.begin(), ring_.begin() + static_cast<std::ptrdiff_t>(next_));
  return events;
}

void Recorder::fit() {
  const std::lock_guard lock(mutex_);
  ring_.shrink_to_fit();
}

int64_t Recorder::dropped() const {
  const std::lock_guard lock(mutex_);
  return dropped_;
}

Span::Span(Recorder* recorder, Kind kind, Text text, uint64_t flow, int16_t of)
    : recorder_(recorder != nullptr && recorder->on() && text != nullptr ? recorder : nullptr) {
  if (recorder_ == nullptr) return;
  event_.text = std::move(text);
  event_.kind = kind;
  event_.flow = flow;
  event_.of = of;
  event_.row = Recorder::row_here();
  event_.begin_ns = now_ns();
}

// An event shorter than at_least() is dropped, since it would only fill the ring.
Span::~Span() {
  if (recorder_ == nullptr) return;
  event_.end_ns = now_ns();
  if (event_.end_ns - event_.begin_ns >= least_ns_) recorder_->add(std::move(event_));
}

}  // namespace penstock::trace
