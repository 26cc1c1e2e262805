#pragma once
// Recorder: what one rank did when: the units it computed, the lines of the plan, exchanges with
// peers, reads and writes of the disk, and who waited for what.
//
// [Note: Recorder] A row is a thread that works in order (the model's, each lane's). The last
// events are kept, so that an error can show what led to it; record() keeps all of the steps that
// somebody asked for. Sums go on for ever, whatever was overwritten. An event costs a lock that is
// nearly always free and a shared text; who is switched off costs a branch.
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace penstock::trace {

// kCompute: a unit's forward or backward. kLine: a line of the plan that is no compute. kExchange:
// with peers, inside a line; its bytes are those this rank sends. kWait: for another row's line.
// kRead, kWrite: of the disk, several at once. kStep: from the end of a step to that of the next.
enum class Kind : uint8_t { kCompute, kLine, kExchange, kWait, kRead, kWrite, kStep };
inline constexpr int kNumKinds = 7;
const char* name_of(Kind kind);

using Text = std::shared_ptr<const std::string>;

// Seconds are those of the steady clock, which is the same for all processes of a machine.
struct Event {
  int64_t begin_ns = 0, end_ns = 0;
  int64_t step = 0, bytes = 0;
  uint64_t flow = 0;  // kLine of a lane: its number; kWait: that of the line that was waited for
  Text text;
  int16_t row = 0;
  Kind kind = Kind::kLine;
  int16_t of = 0;  // kWait: the row that is waited for
};

struct EventSum {
  int64_t count = 0, bytes = 0, ns = 0;
  double seconds() const { return static_cast<double>(ns) * 1e-9; }
  void add(const Event& event) {
    ++count;
    bytes += event.bytes;
    ns += event.end_ns - event.begin_ns;
  }
};

int64_t now_ns();

// Whose events they are. Set before lanes begin; the offset when clocks were compared.
struct About {
  int rank = 0;
  std::string host;                    // shown beside the rank
  std::atomic<int64_t> offset_ns = 0;  // what is added to this rank's clock to have rank 0's
  std::string folder;                  // where an error leaves the last events; empty: nowhere
};

// Any thread.
class Recorder {
 public:
  static constexpr int kModel = 0, kDisk = 1;        // rows that there always are
  static constexpr int64_t kMostRecorded = 1 << 20;  // events that record() keeps

  // `kept`: how many events; 0: nothing is recorded, and all sums stay 0.
  explicit Recorder(int64_t kept);

  bool on() const { return kept_ > 0; }
  // The row of that name, which is made where there is none.
  int16_t row(const std::string& name);
  std::vector<std::string> rows() const;
  // Of this thread; the model's where nobody said. Returns the one before.
  static int16_t set_row_here(int16_t row);
  static int16_t row_here();
  // The line that this thread works at, which what it hands to lanes is for; null: none.
  static Text set_line_here(Text line);
  static const Text& line_here();

  void set_step(int64_t step) { step_.store(step, std::memory_order_relaxed); }
  int64_t step() const { return step_.load(std::memory_order_relaxed); }
  uint64_t next_flow() { return flows_.fetch_add(1, std::memory_order_relaxed) + 1; }

  void add(Event event);
  EventSum sum(int16_t row, Kind kind) const;
  // By the model's row for that one.
  EventSum waited_for(int16_t row) const;
  // Of that kind in all rows.
  EventSum sum(Kind kind) const;

  // From now on all events are kept, or no longer. Returns those kept since it was begun.
  void record();
  std::vector<Event> end_record();
  // The last ones, oldest first.
  std::vector<Event> last() const;
  int64_t dropped() const;  // by record(), for their number

  About about;

 private:
  const int64_t kept_;
  std::atomic<int64_t> step_ = 0;
  std::atomic<uint64_t> flows_ = 0;
  mutable std::mutex mutex_;
  std::vector<std::string> rows_;                      // all below guarded by mutex_
  std::vector<std::array<EventSum, kNumKinds>> sums_;  // by row
  std::vector<EventSum> waited_;                       // by row
  std::vector<Event> ring_;
  size_t next_ = 0;
  bool records_ = false;
  std::vector<Event> recorded_;
  int64_t dropped_ = 0;
};

// In scope: an event of this thread's row. The recorder may be null, or off.
class Span {
 public:
  Span(Recorder* recorder, Kind kind, Text text, uint64_t flow = 0, int16_t of = 0);
  ~Span();
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;
  void add_bytes(int64_t bytes) { event_.bytes += bytes; }
  // What is shorter is worth no event.
  void at_least(int64_t ns) { least_ns_ = ns; }

 private:
  Recorder* const recorder_;
  Event event_;
  int64_t least_ns_ = 0;
};

// In scope: this thread works at that line.
class AtLine {
 public:
  explicit AtLine(Text line) : before_(Recorder::set_line_here(std::move(line))) {}
  ~AtLine() { Recorder::set_line_here(std::move(before_)); }
  AtLine(const AtLine&) = delete;
  AtLine& operator=(const AtLine&) = delete;

 private:
  Text before_;
};

}  // namespace penstock::trace
