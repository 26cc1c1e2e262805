#pragma once
// Stored: a copy that rests in memory or on disk. DiskTraffic: moves those of disk, read ahead and
// written behind.
#include <cstdint>
#include <deque>
#include <mutex>

#include "src/mem/tiers.h"

namespace penstock::exec {

struct Stored {
  mem::Lease memory;  // where it rests, or a window while it is away from disk
  int64_t bytes = 0;  // 0: there is no such copy
  Tier tier = Tier::kDevice;
  int64_t offset = -1;     // of its extent on disk
  mem::DiskTicket moving;  // the read into `memory` or the write from it
  bool writing = false;    // `memory` is let go when the write is done

  bool exists() const { return bytes > 0; }
  bool on_disk() const { return tier == Tier::kDisk; }
  char* data() const { return memory.data(); }
};

// Any thread, but one at a time for each copy. Copies keep their addresses; one may be a part of
// another on disk, and what is read comes after the writes of its bytes.
class DiskTraffic {
 public:
  explicit DiskTraffic(mem::Tiers& tiers) : tiers_(tiers) {}

  // Starts the read, unless the bytes are in memory.
  void fetch(Stored& copy, mem::Account account);
  // Memory for the bytes, which are about to be written whole.
  void make_room(Stored& copy, mem::Account account);
  // The bytes are in memory when this returns.
  void wait_read(const Stored& copy) const;
  // Starts the write; the memory is let go when it is done. To be called for a chunk's copies after
  // settle(): one chunk at most is on its way in
  // an update.
  void put_back(Stored& copy);
  // What was fetched and not changed.
  void let_go(Stored& copy);
  // Gives its memory back when nothing moves it any more, whatever is in it.
  void drop(Stored& copy);
  void settle();  // every write is done

 private:
  void room_for(Stored& copy, mem::Account account);
  bool is_being_written(const Stored& copy) const;
  void finish_oldest();

  mem::Tiers& tiers_;
  std::mutex mutex_;
  std::deque<Stored*> writing_;  // guarded by mutex_, and so is what each of them is
};

}  // namespace penstock::exec
