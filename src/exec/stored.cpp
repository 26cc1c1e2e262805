#include "src/exec/stored.h"

#include <algorithm>

namespace penstock::exec {

void DiskTraffic::make_room(Stored& copy, mem::Account account) {
  if (!copy.exists()) return;
  const std::lock_guard lock(mutex_);
  room_for(copy, account);
}

// Its own bytes, or some of them through another copy.
bool DiskTraffic::is_being_written(const Stored& copy) const {
  return std::any_of(writing_.begin(), writing_.end(), [&](const Stored* other) {
    return other->offset < copy.offset + copy.bytes && copy.offset < other->offset + other->bytes;
  });
}

void DiskTraffic::room_for(Stored& copy, mem::Account account) {
  while (copy.on_disk() && is_being_written(copy)) finish_oldest();
  if (copy.on_disk()) tiers_.disk->wait(copy.moving);  // a read that nobody waited for
  if (!copy.memory) copy.memory = tiers_.arena(copy.tier).take(copy.bytes, account);
  copy.moving = {};
}

void DiskTraffic::fetch(Stored& copy, mem::Account account) {
  const std::lock_guard lock(mutex_);
  if (!copy.on_disk() || !copy.exists() || (copy.memory && !copy.writing)) return;
  room_for(copy, account);
  copy.moving = tiers_.disk->read(copy.offset, copy.data(), copy.bytes);
}

void DiskTraffic::wait_read(const Stored& copy) const {
  if (copy.on_disk()) tiers_.disk->wait(copy.moving);
}

void DiskTraffic::put_back(Stored& copy) {
  if (!copy.on_disk() || !copy.exists()) return;
  const std::lock_guard lock(mutex_);
  copy.moving = tiers_.disk->write(copy.offset, copy.data(), copy.bytes);
  copy.writing = true;
  writing_.push_back(&copy);
}

void DiskTraffic::let_go(Stored& copy) {
  if (!copy.on_disk()) return;
  const std::lock_guard lock(mutex_);
  if (!copy.writing && tiers_.disk->done(copy.moving)) copy.memory.reset();  // else close() does
}

void DiskTraffic::drop(Stored& copy) {
  const std::lock_guard lock(mutex_);
  while (copy.writing) finish_oldest();
  if (copy.on_disk()) tiers_.disk->wait(copy.moving);
  copy.memory.reset();
}

void DiskTraffic::finish_oldest() {
  Stored& oldest = *writing_.front();
  tiers_.disk->wait(oldest.moving);
  writing_.pop_front();
  oldest.writing = false;
  oldest.memory.reset();
}

void DiskTraffic::settle() {
  const std::lock_guard lock(mutex_);
  while (!writing_.empty()) finish_oldest();
}

}  // namespace penstock::exec
