#include "tests/device/simulated/counting.h"

#include <mutex>

#include "tests/device/simulated/control.h"

namespace penstock::sim {
namespace {

constexpr size_t kKeptOperators = 100;

struct Book {
  std::mutex mutex;
  Counters counters;  // guarded by mutex
};

// Never destroyed: other static objects free device memory when the process ends.
Book& book() {
  static Book* const book = new Book;
  return *book;
}

void add(Tally& tally, size_t bytes) {
  ++tally.count;
  tally.bytes += static_cast<int64_t>(bytes);
}

// The caller holds the lock.
void add_traffic(const std::string& name, size_t bytes) {
  add(book().counters.traffic, bytes);
  add(book().counters.traffic_by_name[name], bytes);
}

}  // namespace

Counters counters() {
  const std::lock_guard lock(book().mutex);
  return book().counters;
}

void reset_counters() {
  const std::lock_guard lock(book().mutex);
  book().counters = {};
}

void count_kernel(const std::string& name, size_t bytes) {
  const std::lock_guard lock(book().mutex);
  ++book().counters.kernels;
  add_traffic(name, bytes);
}

void count_temporary(size_t bytes) {
  const std::lock_guard lock(book().mutex);
  add(book().counters.temporaries, bytes);
}

void count_new_event() {
  const std::lock_guard lock(book().mutex);
  ++book().counters.new_events;
}

void count_host_wait(const std::string& name) {
  const std::lock_guard lock(book().mutex);
  ++book().counters.host_waits;
  ++book().counters.host_waits_by_name[name];
}

void count_copy(Direction direction, size_t bytes, size_t touched) {
  const std::lock_guard lock(book().mutex);
  Counters& now = book().counters;
  add(direction == Direction::kHostToDevice   ? now.h2d
      : direction == Direction::kDeviceToHost ? now.d2h
                                              : now.d2d,
      bytes);
  if (direction == Direction::kDeviceToDevice) add_traffic("copy", touched);
}

void count_collective(const std::string& name, size_t bytes) {
  const std::lock_guard lock(book().mutex);
  add(book().counters.collectives, bytes);
  add(book().counters.collectives_by_name[name], bytes);
}

void count_synchronous_operator(const std::string& name) {
  const std::lock_guard lock(book().mutex);
  auto& kept = book().counters.synchronous_operators;
  if (kept.size() == kKeptOperators) kept.erase(kept.begin());
  kept.push_back(name);
}

}  // namespace penstock::sim
