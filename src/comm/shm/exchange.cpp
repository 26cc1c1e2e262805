#include "src/comm/shm/exchange.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "src/base/text.h"

namespace penstock::comm {

namespace {

uint64_t address_of(const void* data) { return reinterpret_cast<uint64_t>(data); }

std::vector<ShmSpan> spans_of(const std::vector<Piece>& pieces, int peer) {
  std::vector<ShmSpan> spans;
  for (const Piece& piece : pieces) {
    if (piece.peer != peer) continue;
    spans.push_back({address_of(piece.data), static_cast<uint64_t>(piece.bytes)});
  }
  return spans;
}

// Returns the peers in the order in which they first appear.
std::vector<int> peers_of(const std::vector<Piece>& pieces) {
  std::vector<int> peers;
  for (const Piece& piece : pieces) {
    if (std::find(peers.begin(), peers.end(), piece.peer) == peers.end()) {
      peers.push_back(piece.peer);
    }
  }
  return peers;
}

}  // namespace

// ---- messages to a peer
//
// lost() is always read before the shared words. A peer may post or take a message and then end.
// This order finds these messages first, and reports the loss of the peer afterwards.

ShmSender::ShmSender(ShmFabric& fabric, int peer, uint32_t tag, std::vector<ShmSpan> spans)
    : fabric_(&fabric), peer_(peer), tag_(tag), from_(std::move(spans)) {
  chunked_ = !fabric.spans() || from_.bytes() <= kChunks * fabric.segment_->shape().chunk_bytes();
}

ShmSender::ShmSender(ShmSender&& other) noexcept
    : fabric_(other.fabric_),
      peer_(other.peer_),
      tag_(other.tag_),
      from_(std::move(other.from_)),
      slot_(other.slot_),
      chunked_(other.chunked_),
      done_(std::exchange(other.done_, true)) {}

ShmSender::~ShmSender() {
  if (!done_) withdraw();
}

bool ShmSender::advance() {
  if (done_) return false;
  const std::string lost = fabric_->lost(peer_);  // before the shared words
  const bool began = slot_ < 0 && begin();
  if (slot_ < 0) {
    if (!lost.empty()) throw std::runtime_error(lost);
    return false;
  }
  if (chunked_ && fill()) return true;
  if (!chunked_) {
    ShmLink& link = fabric_->segment_->link(fabric_->rank(), peer_);
    const uint64_t head = link.heads[slot_].load(std::memory_order_acquire);
    if (state_of(head) == ShmState::kTaken) {
      fabric_->release(fabric_->rank(), peer_, slot_);
      done_ = true;
      return true;
    }
  }
  if (!lost.empty()) throw std::runtime_error(lost);
  return began;
}

bool ShmSender::begin() {
  slot_ = fabric_->acquire(peer_);
  if (slot_ < 0) return false;
  ShmSlot& slot = fabric_->segment_->link(fabric_->rank(), peer_).slots[slot_];
  slot.filled.store(0, std::memory_order_relaxed);
  slot.emptied.store(0, std::memory_order_relaxed);
  slot.bytes = static_cast<uint64_t>(from_.bytes());
  slot.form = chunked_ ? ShmForm::kChunked : ShmForm::kSpans;
  if (chunked_) {
    while (fill_one()) {  // the bell rings once for a small message
    }
  } else {
    const std::vector<ShmSpan>& spans = from_.spans();
    slot.num_spans = static_cast<uint32_t>(spans.size());
    slot.spans_at = address_of(spans.data());
    if (spans.size() <= slot.spans.size())
      std::copy(spans.begin(), spans.end(), slot.spans.begin());
  }
  fabric_->post(peer_, slot_, tag_);
  return true;
}

// Fills the next chunk if bytes are left and a chunk is empty. Returns whether it filled one.
bool ShmSender::fill_one() {
  const ShmSegment& segment = *fabric_->segment_;
  ShmSlot& slot = segment.link(fabric_->rank(), peer_).slots[slot_];
  const uint32_t number = slot.filled.load(std::memory_order_relaxed);
  if (from_.left() == 0 || number - slot.emptied.load(std::memory_order_acquire) >= kChunks) {
    return false;
  }
  char* to = segment.chunk(fabric_->rank(), peer_, slot_, number);
  int64_t room = segment.shape().chunk_bytes();
  while (room > 0 && from_.left() > 0) {
    const std::span<char> piece = from_.next(room);
    std::memcpy(to, piece.data(), piece.size());
    to += piece.size();
    room -= static_cast<int64_t>(piece.size());
    from_.pass(static_cast<int64_t>(piece.size()));
  }
  slot.filled.store(number + 1, std::memory_order_release);
  return true;
}

bool ShmSender::fill() {
  bool moved = false;
  while (fill_one()) {
    moved = true;
    fabric_->ring(peer_, ShmFabric::waits_for(tag_));
  }
  if (from_.left() > 0) return moved;
  done_ = true;  // the receiver frees the slot
  return true;
}

void ShmSender::withdraw() {
  if (slot_ >= 0) {
    ShmLink& link = fabric_->segment_->link(fabric_->rank(), peer_);
    const uint64_t before = link.heads[slot_].exchange(head_of(tag_, ShmState::kWithdrawn));
    // While the receiver still reads the slot, the slot must not be reused.
    if (state_of(before) != ShmState::kTaking) {
      fabric_->release(fabric_->rank(), peer_, slot_);
    }
  }
  fabric_->give_up(peer_);
}

// ---- messages from a peer

ShmReceiver::ShmReceiver(ShmFabric& fabric, int peer, uint32_t tag, int64_t bytes)
    : fabric_(&fabric), peer_(peer), tag_(tag), bytes_(bytes) {}

ShmReceiver::ShmReceiver(ShmReceiver&& other) noexcept
    : fabric_(other.fabric_),
      peer_(other.peer_),
      tag_(other.tag_),
      bytes_(other.bytes_),
      taken_(other.taken_),
      slot_(other.slot_),
      done_(std::exchange(other.done_, true)),
      form_(other.form_),
      from_(std::move(other.from_)) {}

ShmReceiver::~ShmReceiver() {
  if (!done_) fabric_->give_up(peer_);
}

bool ShmReceiver::meet() {
  if (met()) return true;
  const std::string lost = fabric_->lost(peer_);  // before the shared words
  slot_ = fabric_->take(peer_, tag_);
  if (slot_ >= 0) {
    claim();
    return true;
  }
  if (!lost.empty()) throw std::runtime_error(lost);
  return false;
}

void ShmReceiver::claim() {
  const ShmSlot& slot = fabric_->segment_->link(peer_, fabric_->rank()).slots[slot_];
  if (static_cast<int64_t>(slot.bytes) != bytes_) {
    throw std::runtime_error(
        concat("rank ", peer_, " sent ", slot.bytes, " bytes where ", bytes_, " were expected"));
  }
  form_ = slot.form;
  // A long list of spans does not fit into the slot, so the list itself is also read from the
  // sender's memory.
  if (form_ == ShmForm::kSpans) {
    std::vector<ShmSpan> spans(slot.num_spans);
    if (spans.size() <= slot.spans.size()) {
      std::copy_n(slot.spans.begin(), spans.size(), spans.begin());
    } else {
      const auto size = static_cast<uint64_t>(spans.size() * sizeof(ShmSpan));
      SpanCursor theirs({{slot.spans_at, size}}), ours({{address_of(spans.data()), size}});
      fabric_->copy_from(peer_, theirs, ours, static_cast<int64_t>(size));
    }
    from_ = SpanCursor(std::move(spans));
  }
  if (bytes_ == 0) end();
}

int64_t ShmReceiver::read(SpanCursor& to) {
  if (done_) return 0;
  int64_t count = std::min(to.left(), bytes_ - taken_);
  if (form_ == ShmForm::kSpans) {
    fabric_->copy_from(peer_, from_, to, count);
    taken_ += count;
  } else {
    const std::string lost = fabric_->lost(peer_);  // before the shared words
    count = read_chunks(to);
    if (count == 0 && to.left() > 0 && !lost.empty()) throw std::runtime_error(lost);
  }
  if (taken_ == bytes_) end();
  return count;
}

int64_t ShmReceiver::read_chunks(SpanCursor& to) {
  const ShmSegment& segment = *fabric_->segment_;
  ShmSlot& slot = segment.link(peer_, fabric_->rank()).slots[slot_];
  const int64_t chunk_bytes = segment.shape().chunk_bytes();
  int64_t count = 0;
  while (to.left() > 0 && taken_ < bytes_) {
    const auto number = static_cast<uint32_t>(taken_ / chunk_bytes);
    if (slot.filled.load(std::memory_order_acquire) == number) break;
    const int64_t at = taken_ % chunk_bytes;
    const std::span<char> piece = to.next(std::min(chunk_bytes - at, bytes_ - taken_));
    std::memcpy(piece.data(), segment.chunk(peer_, fabric_->rank(), slot_, number) + at,
                piece.size());
    const auto moved = static_cast<int64_t>(piece.size());
    to.pass(moved);
    taken_ += moved;
    count += moved;
    if (taken_ % chunk_bytes != 0 || taken_ == bytes_) continue;
    slot.emptied.store(number + 1, std::memory_order_release);
    // The sender fills this chunk again only if the message has a chunk whose number is higher by
    // kChunks.
    if (bytes_ > (int64_t{number} + kChunks) * chunk_bytes) {
      fabric_->ring(peer_, ShmFabric::waits_for(tag_));
    }
  }
  return count;
}

void ShmReceiver::end() {
  if (form_ == ShmForm::kChunked) {
    fabric_->release(peer_, fabric_->rank(), slot_);
  } else {
    ShmLink& link = fabric_->segment_->link(peer_, fabric_->rank());
    // If the sender has withdrawn the message, the received bytes may be wrong.
    uint64_t head = head_of(tag_, ShmState::kTaking);
    if (!link.heads[slot_].compare_exchange_strong(head, head_of(tag_, ShmState::kTaken))) {
      throw std::runtime_error(
          concat("rank ", peer_, " has withdrawn the message that it was sending"));
    }
    fabric_->ring(peer_, ShmFabric::waits_for(tag_));
  }
  done_ = true;
}

// ---- exchanges

ShmExchange::ShmExchange(ShmFabric& fabric, const std::vector<Piece>& sends,
                         const std::vector<Piece>& receives, uint32_t tag)
    : fabric_(fabric), tag_(tag) {
  for (const int peer : peers_of(sends)) {
    sends_.emplace_back(fabric, peer, tag, spans_of(sends, peer));
  }
  for (const int peer : peers_of(receives)) {
    SpanCursor to(spans_of(receives, peer));
    const int64_t bytes = to.bytes();
    receives_.push_back({ShmReceiver(fabric, peer, tag, bytes), std::move(to)});
  }
}

bool ShmExchange::done() const {
  const auto is_done = [](const auto& one) { return one.done(); };
  return std::all_of(sends_.begin(), sends_.end(), is_done) &&
         std::all_of(receives_.begin(), receives_.end(),
                     [&](const Arrival& one) { return is_done(one.message); });
}

bool ShmExchange::posted() const {
  return std::all_of(sends_.begin(), sends_.end(),
                     [](const ShmSender& one) { return one.posted(); }) &&
         std::all_of(receives_.begin(), receives_.end(),
                     [](const Arrival& one) { return one.message.met(); });
}

bool ShmExchange::advance_sends() {
  bool moved = false;
  for (ShmSender& one : sends_) moved = one.advance() || moved;
  return moved;
}

bool ShmExchange::advance() {
  bool moved = advance_sends();
  for (Arrival& one : receives_) {
    if (one.message.done() || !one.message.meet()) continue;
    const bool read = one.message.read(one.to) > 0;
    moved = moved || read || one.message.done();
  }
  return moved;
}

// Returns the peer for which the exchange waits, or the first one if there are several.
int ShmExchange::awaited() const {
  for (const Arrival& one : receives_) {
    if (!one.message.done()) return one.message.peer();
  }
  for (const ShmSender& one : sends_) {
    if (!one.done()) return one.peer();
  }
  return -1;
}

// Calls `met` until it returns true. `met` tries to move bytes, and sets its argument to whether
// any moved. The bell is read before each call, so a change after the call is not missed.
template <class Condition>
void ShmExchange::wait_until(const Condition& met, const ShmWait& wait) {
  using Clock = ShmFabric::Clock;
  Clock::time_point deadline{};
  while (true) {
    const uint32_t seen = fabric_.bell();
    fabric_.throw_if_ended();
    bool moved = false;
    if (met(&moved)) return;
    if (moved || deadline == Clock::time_point{}) deadline = Clock::now() + wait.limit;
    if (moved) continue;
    if (wait.waits_for) wait.waits_for(awaited());
    if (!fabric_.sleep(seen, ShmFabric::waits_for(tag_), deadline)) {
      throw std::runtime_error(concat("nothing arrived from rank ", awaited(), " within ",
                                      static_cast<double>(wait.limit.count()) / 1e3, " s"));
    }
  }
}

void ShmExchange::finish(const ShmWait& wait) {
  wait_until(
      [&](bool* moved) {
        *moved = advance();
        return done();
      },
      wait);
}

void ShmExchange::read(int peer, SpanCursor& to, const ShmWait& wait) {
  const auto from = std::find_if(receives_.begin(), receives_.end(),
                                 [&](const Arrival& one) { return one.message.peer() == peer; });
  wait_until(
      [&](bool* moved) {
        *moved = advance_sends();
        if (from->message.meet()) *moved = from->message.read(to) > 0 || *moved;
        return to.left() == 0;
      },
      wait);
}

}  // namespace penstock::comm
