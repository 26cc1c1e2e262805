#pragma once
// The layout of the memory that the ranks of one host share. Every word that two ranks may access
// at once is atomic. All other memory has one writer at a time, and an atomic word passes the
// memory to the next thread.
//
// [Note: Shared memory] Each ordered pair of ranks has a link with a few slots, and each slot holds
// one message. The sender takes a free slot, describes the message in it, and posts it: the slot's
// head then has the state `kPosted` and the message's tag. The receiver searches the link's heads
// for the tag and takes the message. A message has one of two forms. `kChunked`: the sender copies
// it into the slot's chunks and the receiver copies it out. This form is used for small messages,
// and for all messages if the kernel does not let processes read each other's memory. `kSpans`: the
// receiver copies it directly from the sender's memory. No rank writes to another rank's own
// memory. So a rank that gives up a message only has to reclaim the slot, and a rank that dies
// leaves no half-written memory in other ranks.
//
// A rank sleeps on its bell, which is a futex. When a rank changes something that a peer may wait
// for, it increments the peer's bell and wakes the peer's threads that wait for the tag.
#include <array>
#include <atomic>
#include <cstdint>

namespace penstock::comm {

inline constexpr uint64_t kShmMagic = 0x3130'6d68'736b'6e70ULL;  // identifies this layout
inline constexpr int kMostSlots = 32;                            // messages in flight per link
inline constexpr int kInlineSpans = 6;
inline constexpr int kChunks = 2;  // per slot: one is filled while the other is emptied

static_assert(std::atomic<uint64_t>::is_always_lock_free);
static_assert(std::atomic<uint32_t>::is_always_lock_free);

// A contiguous part of the sender's own memory.
struct ShmSpan {
  uint64_t address = 0, bytes = 0;
};

// The bell of one rank. All ranks write to it.
struct alignas(64) ShmBell {
  std::atomic<uint32_t> word = 0;
  std::atomic<uint32_t> sleepers = 0;
  std::atomic<uint32_t> left = 0;  // 1: the rank has closed its connections
};

// The lower half of a slot's head. The upper half is the message's tag.
enum class ShmState : uint32_t {
  kFree,
  kFilling,    // the sender writes the description
  kPosted,     // the receiver may take it
  kTaking,     // the receiver reads it
  kTaken,      // the receiver has read the sender's memory; the sender frees the slot
  kWithdrawn,  // the sender gave up while the receiver was reading; the slot stays unused
};

enum class ShmForm : uint32_t { kChunked, kSpans };

struct alignas(64) ShmSlot {
  uint64_t sequence = 0, bytes = 0;
  ShmForm form = ShmForm::kChunked;
  uint32_t num_spans = 0;
  uint64_t spans_at = 0;  // if the list is longer than `spans`: its address in the sender's memory
  std::array<ShmSpan, kInlineSpans> spans{};
  alignas(64) std::atomic<uint32_t> filled = 0;   // number of chunks filled so far
  alignas(64) std::atomic<uint32_t> emptied = 0;  // number of chunks emptied so far
};

// The messages from one rank to another.
struct alignas(64) ShmLink {
  std::array<std::atomic<uint64_t>, kMostSlots> heads{};
  std::atomic<uint32_t> starved = 0;  // the sender waits for a free slot
  std::atomic<uint32_t> broken = 0;   // the sender gave up an exchange with the receiver
  std::array<ShmSlot, kMostSlots> slots{};
};

struct ShmHeader {
  uint64_t magic = 0, key = 0;
  int32_t size = 0, num_slots = 0;
  int64_t chunk_bytes = 0;
};

// The numbers that determine the size of a segment.
struct ShmShape {
  int size = 1;       // ranks
  bool spans = true;  // receivers can read the senders' memory
  int num_slots() const { return size <= 16 ? kMostSlots / 2 : kMostSlots / 4; }
  // Bytes of one chunk. Chunks are small if only small messages are chunked.
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
