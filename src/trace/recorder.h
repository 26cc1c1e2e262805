#pragma once
// Recorder: records what one rank did and when. It covers computed units, plan lines, exchanges
// with peers, disk reads and writes, and waits.
//
// [Note: Recorder] A row is one thread that works in order (the model's thread, each lane). The
// recorder always keeps the most recent events, so that an error can show what led to it. record()
// keeps all events of the requested steps. Sums include events that were overwritten. An event
// costs an uncontended lock and a reference to a shared text. If the recorder is off, it costs one
// branch.
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace penstock::trace {

// kCompute: a unit's forward or backward. kLine: a plan line other than compute. kExchange: an
// exchange with peers, inside a line; its bytes are the bytes that this rank sends. kWait: a wait
// for a line of another row. kRead, kWrite: disk requests, which may overlap. kStep: from the end
// of one step to the end of the next.
enum class Kind : uint8_t { kCompute, kLine, kExchange, kWait, kRead, kWrite, kStep };
inline constexpr int kNumKinds = 7;
const char* name_of(Kind kind);

using Text = std::shared_ptr<const std::string>;

// Times are from the steady clock, which is the same for all processes of a machine.
struct Event {
  int64_t begin_ns = 0, end_ns = 0;
  int64_t step = 0, bytes = 0;
  uint64_t flow =
      0;  // kLine: the line's number in its lane; kWait: the number of the line waited for
  Text text;
  int16_t row = 0;
  Kind kind = Kind::kLine;
  int16_t of = 0;  // kWait: the row that was waited for
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

// The rank to which the events belong. All members are set before lanes begin, except offset_ns,
// which is set when clocks are compared.
struct About {
  int rank = 0;
  std::string host;                    // shown beside the rank
  std::atomic<int64_t> offset_ns = 0;  // clock of rank 0 minus clock of this rank
  std::string folder;  // folder for the last events after an error; empty: not written
};

// Usable from any thread.
class Recorder {
 public:
  static constexpr int kModel = 0, kDisk = 1;        // rows that always exist
  static constexpr int64_t kMostRecorded = 1 << 20;  // events that record() keeps

  // `kept`: number of events to keep; 0: nothing is recorded, and all sums stay 0.
  explicit Recorder(int64_t kept);

  bool on() const { return kept_ > 0; }
  // Returns the row with this name; makes it if it is missing.
  int16_t row(const std::string& name);
  std::vector<std::string> rows() const;
  // The calling thread's row; the model's row if none was set. set_row_here() returns the previous
  // row.
  static int16_t set_row_here(int16_t row);
  static int16_t row_here();
  // The plan line that the calling thread executes; null if none. Work that the thread submits to
  // lanes belongs to this line.
  static Text set_line_here(Text line);
  static const Text& line_here();

  void set_step(int64_t step) { step_.store(step, std::memory_order_relaxed); }
  int64_t step() const { return step_.load(std::memory_order_relaxed); }
  uint64_t next_flow() { return flows_.fetch_add(1, std::memory_order_relaxed) + 1; }

  void add(Event event);
  EventSum sum(int16_t row, Kind kind) const;
  // Returns the sum over the waits in which the model's row waited for this row.
  EventSum waited_for(int16_t row) const;
  // Returns the sum over all events of this kind, on all rows.
  EventSum sum(Kind kind) const;

  // record() starts to keep all events. end_record() stops this and returns the events kept since.
  void record();
  std::vector<Event> end_record();
  // Returns the last events, oldest first.
  std::vector<Event> last() const;
  // Frees the memory reserved for future events. Later events may then allocate memory again.
  void fit();
  int64_t dropped() const;  // events beyond kMostRecorded, which record() did not keep

  About about;

 private:
  const int64_t kept_;
  std::atomic<int64_t> step_ = 0;
  std::atomic<uint64_t> flows_ = 0;
  mutable std::mutex mutex_;
  std::vector<std::string> rows_;                      // this and all below: guarded by mutex_
  std::vector<std::array<EventSum, kNumKinds>> sums_;  // by row
  std::vector<EventSum> waited_;                       // by row
  std::vector<Event> ring_;
  size_t next_ = 0;
  bool records_ = false;
  std::vector<Event> recorded_;
  int64_t dropped_ = 0;
};

// RAII: records an event of the calling thread's row. The recorder may be null or off.
class Span {
 public:
  Span(Recorder* recorder, Kind kind, Text text, uint64_t flow = 0, int16_t of = 0);
  ~Span();
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;
  void add_bytes(int64_t bytes) { event_.bytes += bytes; }
  // Events shorter than this are not recorded.
  void at_least(int64_t ns) { least_ns_ = ns; }

 private:
  Recorder* const recorder_;
  Event event_;
  int64_t least_ns_ = 0;
};

// RAII: sets the plan line that the calling thread executes.
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
