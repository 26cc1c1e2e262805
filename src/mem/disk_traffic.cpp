#include "src/mem/disk_traffic.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace penstock::mem {

void DiskTraffic::settle(int64_t begin, int64_t end) {
  const auto overlaps = [&](const Write& write) {
    return write.offset < end && begin < write.offset + write.bytes;
  };
  std::unique_lock lock(mutex_);
  while (true) {
    const auto found = std::find_if(writing_.begin(), writing_.end(), overlaps);
    if (found == writing_.end()) return;
    const auto [ticket, number] = std::pair(found->ticket, found->number);
    // Other threads may add and remove writes during the wait, so the search starts again.
    lock.unlock();
    tiers_.disk->wait(ticket);
    lock.lock();
    std::erase_if(writing_, [&](const Write& write) { return write.number == number; });
  }
}

void DiskTraffic::settle() { settle(0, std::numeric_limits<int64_t>::max()); }

void DiskTraffic::forget() {
  const std::lock_guard lock(mutex_);
  writing_.clear();
}

void DiskTraffic::make_room(Buffer& buffer, Account account) {
  if (!buffer.exists()) return;
  if (buffer.on_disk()) {
    settle(buffer.offset, buffer.offset + buffer.bytes());
    tiers_.disk->wait(buffer.moving);  // a read that nothing has waited for
    buffer.moving = {};
  }
  if (!buffer.memory) buffer.memory = tiers_.arena(buffer.tier).take(buffer.bytes(), account);
}

void DiskTraffic::fetch(Buffer& buffer, Account account) {
  if (!buffer.on_disk() || !buffer.exists() || buffer.memory) return;
  make_room(buffer, account);
  try {
    buffer.moving = tiers_.disk->read(buffer.offset, buffer.data().host(), buffer.bytes());
  } catch (...) {  // no read started, so the memory must not count as loaded
    buffer.memory.reset();
    throw;
  }
}

DiskTicket DiskTraffic::read(const Buffer& buffer, device::Address to) {
  settle(buffer.offset, buffer.offset + buffer.bytes());
  return tiers_.disk->read(buffer.offset, to.host(), buffer.bytes());
}

void DiskTraffic::wait_read(const Buffer& buffer) const {
  if (tiers_.disk) tiers_.disk->wait(buffer.moving);
}

void DiskTraffic::changes(const Buffer& buffer) {
  if (buffer.on_disk() || !buffer.exists()) return;
  if (const auto watch = watch_.load()) watch->memory_changes(buffer.data().data, buffer.bytes());
}

void DiskTraffic::claim_write(Buffer& buffer) {
  if (!Disk::is_read_only(buffer.offset) || buffer.writable >= 0) return;
  buffer.writable = tiers_.disk->claim(buffer.bytes());
}

void DiskTraffic::put_back(Buffer& buffer) {
  if (!buffer.on_disk() || !buffer.exists()) return;
  if (const auto watch = watch_.load()) watch->disk_changes(buffer.offset, buffer.bytes());
  settle(buffer.offset, buffer.offset + buffer.bytes());
  claim_write(buffer);
  if (Disk::is_read_only(buffer.offset)) buffer.offset = buffer.writable;
  if (!tiers_.computes.is_host()) tiers_.computes.synchronize();  // work that fills the buffer
  const std::lock_guard lock(mutex_);
  Write write{buffer.offset, buffer.bytes(), {}, {}, num_writes_++};
  write.ticket = tiers_.disk->write(buffer.offset, buffer.data().host(), buffer.bytes());
  write.memory = std::move(buffer.memory);
  writing_.push_back(std::move(write));
}

void DiskTraffic::let_go(Buffer& buffer) {
  if (!buffer.on_disk()) return;
  if (tiers_.disk->done(buffer.moving)) buffer.memory.reset();  // otherwise close() frees it
}

void DiskTraffic::drop(Buffer& buffer) {
  if (buffer.on_disk()) tiers_.disk->wait(buffer.moving);
  buffer.memory.reset();
}

}  // namespace penstock::mem
