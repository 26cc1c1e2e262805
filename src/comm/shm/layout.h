#pragma once
// What ranks of one host share: the memory's layout. A pure description; every word that two ranks
// may touch at once is an atomic, all else in it has one writer until such a word hands it over.
//
// [Note: Shared memory] Each ordered pair of ranks has a link of a few slots, each of which holds
// one message. Its sender takes a free slot, describes the message, and posts it with its tag; the
// receiver looks for the tag among the link's posted heads and takes it. A message either lies in
// the slot's own chunks, copied in and out (`kChunked`: small ones, and all of them where the
// kernel lets no process read another's memory), or the receiver copies it straight out of the
// sender's memory (`kSpans`). Nobody writes to another's own memory, so a rank that gives up on a
// message takes back no more than the slot, and one that dies leaves nothing half-written.
//
// A rank sleeps on its bell, a futex: whoever changes something that it may wait for counts the
// bell up and wakes those of its threads that wait for that tag.
#include <array>
#include <atomic>
#include <cstdint>

namespace penstock::comm {

inline constexpr uint64_t kShmMagic = 0x3130'6d68'736b'6e70ULL;  // of this layout
inline constexpr int kMostSlots = 32;                            // messages under way in a link
inline constexpr int kInlineSpans = 6;
inline constexpr int kChunks = 2;  // of a slot: one is filled while the other is emptied

static_assert(std::atomic<uint64_t>::is_always_lock_free);
static_assert(std::atomic<uint32_t>::is_always_lock_free);

// A piece of the sender's own memory.
struct ShmSpan {
  uint64_t address = 0, bytes = 0;
};

// Of one rank; written by all.
struct alignas(64) ShmBell {
  std::atomic<uint32_t> word = 0;
  std::atomic<uint32_t> sleepers = 0;
  std::atomic<uint32_t> left = 0;  // the rank has closed its side
};

// A slot's head: the message's tag above one of these.
enum class ShmState : uint32_t {
  kFree,
  kFilling,    // of the sender
  kPosted,     // to be taken
  kTaking,     // the receiver's
  kTaken,      // back to the sender, which still held its own memory for it
  kWithdrawn,  // the sender gave up; the slot is used no more
};

enum class ShmForm : uint32_t { kChunked, kSpans };

struct alignas(64) ShmSlot {
  uint64_t sequence = 0, bytes = 0;
  ShmForm form = ShmForm::kChunked;
  uint32_t num_spans = 0;
  uint64_t spans_at = 0;  // in the sender's memory, where there are more than fit here
  std::array<ShmSpan, kInlineSpans> spans{};
  alignas(64) std::atomic<uint32_t> filled = 0;   // chunks so far
  alignas(64) std::atomic<uint32_t> emptied = 0;  // chunks so far
};

// From one rank to another.
struct alignas(64) ShmLink {
  std::array<std::atomic<uint64_t>, kMostSlots> heads{};
  std::atomic<uint32_t> starved = 0;  // the sender waits for a free slot
  std::atomic<uint32_t> broken = 0;   // its sender gave up an exchange with its receiver
  std::array<ShmSlot, kMostSlots> slots{};
};

struct ShmHeader {
  uint64_t magic = 0, key = 0;
  int32_t size = 0, num_slots = 0;
  int64_t chunk_bytes = 0;
};

// What sizes a segment.
struct ShmShape {
  int size = 1;       // ranks
  bool spans = true;  // receivers read the senders' memory
  int num_slots() const { return size <= 16 ? kMostSlots / 2 : kMostSlots / 4; }
  // Small where only small messages are chunked.
  int64_t chunk_bytes() const {
    if (spans) return size <= 4 ? 16 << 10 : 2 << 10;
    return size <= 8 ? 32 << 10 : 8 << 10;
  }
  int64_t header_bytes() const { return 4096; }
  int64_t bells_at() const { return header_bytes(); }
  int64_t links_at() const { return bells_at() + size * static_cast<int64_t>(sizeof(ShmBell)); }
  int64_t links() const { return int64_t{size} * size; }
  int64_t chunks_at() const {
    const int64_t end = links_at() + links() * static_cast<int64_t>(sizeof(ShmLink));
    return (end + 4095) / 4096 * 4096;
  }
  int64_t bytes() const { return chunks_at() + links() * num_slots() * kChunks * chunk_bytes(); }
};

inline uint64_t head_of(uint32_t tag, ShmState state) {
  return uint64_t{tag} << 32 | static_cast<uint32_t>(state);
}
inline ShmState state_of(uint64_t head) {
  return static_cast<ShmState>(static_cast<uint32_t>(head));
}

}  // namespace penstock::comm
