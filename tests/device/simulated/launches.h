#pragma once
// LaunchBook: counts the collectives that the ranks of this process launch.
#include <c10/util/hash.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

namespace penstock::sim {

// The ranks of a communicator, and its number among the communicators of these ranks. Both are
// known when all ranks of the communicator have connected it together.
struct Identity {
  uint64_t ranks = 0;
  int number = -1;
};

// How often this process has launched collectives on each communicator of the same ranks. NCCL
// requires one order of launches on all ranks. So whenever a rank launches a collective, its counts
// for all these communicators must equal the counts of the other ranks at the same launch.
class LaunchBook {
 public:
  // `device`: this rank's device. It distinguishes ranks that are threads of one process.
  Identity connected(uint64_t ranks, int device) {
    const std::lock_guard lock(mutex_);
    Book& book = books_[{ranks, device}];
    book.launches[book.communicators] = 0;
    return {ranks, book.communicators++};
  }
  void closed(const Identity& of, int device) {
    const std::lock_guard lock(mutex_);
    books_[{of.ranks, device}].launches.erase(of.number);
  }
  // Returns a hash of all counts, with this launch.
  uint64_t launched(const Identity& on, int device) {
    const std::lock_guard lock(mutex_);
    auto& launches = books_[{on.ranks, device}].launches;
    const auto own = launches.find(on.number);
    if (own != launches.end()) ++own->second;
    uint64_t hash = 0;
    for (const auto& [number, count] : launches) {
      hash = c10::hash_combine(hash, c10::hash_combine(static_cast<size_t>(number), count));
    }
    return hash;
  }

 private:
  struct Book {
    int communicators = 0;
    std::map<int, uint64_t> launches;  // by number of the communicator
  };
  std::mutex mutex_;
  std::map<std::pair<uint64_t, int>, Book> books_;
};

}  // namespace penstock::sim
