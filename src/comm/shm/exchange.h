#pragma once
// ShmExchange: what one thread sends to and receives from peers under one tag, over a ShmFabric.
// It moves in steps, so that one thread can also have several under way.
#include <chrono>
#include <cstdint>
#include <functional>
#include <vector>

#include "penstock/group.h"
#include "src/comm/shm/fabric.h"
#include "src/comm/shm/span_cursor.h"

namespace penstock::comm {

// One message to a peer. Without pull(), or when it throws, the message is withdrawn.
class ShmSender {
 public:
  ShmSender(ShmFabric& fabric, int peer, uint32_t tag, std::vector<ShmSpan> spans);
  ~ShmSender();
  ShmSender(ShmSender&& other) noexcept;
  ShmSender& operator=(ShmSender&&) = delete;

  int peer() const { return peer_; }
  bool posted() const { return slot_ >= 0 || done_; }
  // The memory may be used again.
  bool done() const { return done_; }
  // Without waiting; whether something moved. Throws when the peer is lost.
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

// One message from a peer, which is read in order.
class ShmReceiver {
 public:
  ShmReceiver(ShmFabric& fabric, int peer, uint32_t tag, int64_t bytes);
  ~ShmReceiver();
  ShmReceiver(ShmReceiver&& other) noexcept;
  ShmReceiver& operator=(ShmReceiver&&) = delete;

  int peer() const { return peer_; }
  bool met() const { return slot_ >= 0 || done_; }
  bool done() const { return done_; }
  // Whether the message is there. Throws when it cannot come, or is of another size.
  bool meet();
  // What is there of the next bytes that `to` still takes; how many.
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
  SpanCursor from_;  // of the sender's memory
};

// How a thread waits.
struct ShmWait {
  std::chrono::milliseconds limit{};        // without anything moving
  std::function<void(int peer)> waits_for;  // before each sleep, where not empty
};

// Used by one thread. All pieces between two ranks are one message. An exchange that is not done
// when it goes has been given up, and with it the connection to the peers that it waited for.
class ShmExchange {
 public:
  ShmExchange(ShmFabric& fabric, const std::vector<Piece>& sends,
              const std::vector<Piece>& receives, uint32_t tag);

  bool done() const;
  bool advance();
  // All that it sends is on its way, and all that it receives has been found.
  bool posted() const;
  // Until it is done. Throws when a peer is lost, at the limit, or after the fabric's end().
  void finish(const ShmWait& wait);
  // The next bytes of the message from that peer, to anywhere. All of it is to be read so, and the
  // receive's own memory is not used.
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
