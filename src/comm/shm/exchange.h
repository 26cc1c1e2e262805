#pragma once
// ShmExchange: sends data to peers and receives data from them, under one tag, over a ShmFabric. An
// exchange advances in steps, so one thread can drive several exchanges.
#include <chrono>
#include <cstdint>
#include <functional>
#include <vector>

#include "penstock/group.h"
#include "src/comm/shm/fabric.h"
#include "src/comm/shm/span_cursor.h"

namespace penstock::comm {

// One message to a peer. If the message is not done, the destructor withdraws it.
class ShmSender {
 public:
  ShmSender(ShmFabric& fabric, int peer, uint32_t tag, std::vector<ShmSpan> spans);
  ~ShmSender();
  ShmSender(ShmSender&& other) noexcept;
  ShmSender& operator=(ShmSender&&) = delete;

  int peer() const { return peer_; }
  bool posted() const { return slot_ >= 0 || done_; }
  // Returns whether the memory may be reused.
  bool done() const { return done_; }
  // Moves as many bytes as it can without blocking, and returns whether any bytes moved. Throws if
  // the peer is lost.
  bool advance();

 private:
  bool begin();
  bool fill();
  bool fill_one();
  void withdraw();

  ShmFabric* fabric_;
  int peer_;
  uint32_t tag_;
  SpanCursor from_;
  int slot_ = -1;
  bool chunked_ = true, done_ = false;
};

// One message from a peer. Its bytes are read in order.
class ShmReceiver {
 public:
  ShmReceiver(ShmFabric& fabric, int peer, uint32_t tag, int64_t bytes);
  ~ShmReceiver();
  ShmReceiver(ShmReceiver&& other) noexcept;
  ShmReceiver& operator=(ShmReceiver&&) = delete;

  int peer() const { return peer_; }
  bool met() const { return slot_ >= 0 || done_; }
  bool done() const { return done_; }
  // Returns whether the message has been posted. Throws if the message can no longer arrive or has
  // the wrong size.
  bool meet();
  // Copies into `to` the next bytes that have arrived, as many as fit. Returns the number of bytes.
  int64_t read(SpanCursor& to);

 private:
  void claim();
  int64_t read_chunks(SpanCursor& to);
  void end();

  ShmFabric* fabric_;
  int peer_;
  uint32_t tag_;
  int64_t bytes_, taken_ = 0;
  int slot_ = -1;
  bool done_ = false;
  ShmForm form_ = ShmForm::kChunked;
  SpanCursor from_;  // spans of the sender's memory
};

// How a thread waits for an exchange.
struct ShmWait {
  std::chrono::milliseconds limit{};        // longest time without progress
  std::function<void(int peer)> waits_for;  // called before each sleep, if not empty
};

// Used by one thread. All pieces from one rank to another form one message. If an exchange is
// destroyed before it is done, it gives up the connections to the peers that it was waiting for.
class ShmExchange {
 public:
  ShmExchange(ShmFabric& fabric, const std::vector<Piece>& sends,
              const std::vector<Piece>& receives, uint32_t tag);

  bool done() const;
  bool advance();
  // Returns whether every message to send has a slot and every message to receive has been found.
  bool posted() const;
  // Blocks until the exchange is done. Throws if a peer is lost, if the limit is reached, or after
  // the fabric's end().
  void finish(const ShmWait& wait);
  // Copies the next bytes of the message from `peer` into `to`. The whole message must be read with
  // this function. The memory of the message's receive pieces is not used.
  void read(int peer, SpanCursor& to, const ShmWait& wait);

 private:
  struct Arrival {
    ShmReceiver message;
    SpanCursor to;
  };
  template <class Condition>
  void wait_until(const Condition& met, const ShmWait& wait);
  bool advance_sends();
  int awaited() const;

  ShmFabric& fabric_;
  const uint32_t tag_;
  std::vector<ShmSender> sends_;
  std::vector<Arrival> receives_;
};

}  // namespace penstock::comm
