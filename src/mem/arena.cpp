#include "src/mem/arena.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"

namespace penstock::mem {

Lease::Lease(Lease&& other) noexcept
    : arena_(std::exchange(other.arena_, nullptr)),
      data_(std::move(other.data_)),
      bytes_(std::exchange(other.bytes_, 0)),
      account_(other.account_) {}

Lease& Lease::operator=(Lease&& other) noexcept {
  if (this != &other) {
    reset();
    arena_ = std::exchange(other.arena_, nullptr);
    data_ = std::move(other.data_);
    bytes_ = std::exchange(other.bytes_, 0);
    account_ = other.account_;
  }
  return *this;
}

void Lease::reset() {
  if (arena_ != nullptr) arena_->give_back(*this);
  arena_ = nullptr;
  bytes_ = 0;
}

Arena::Arena(c10::Device device) : device_(device) {}

void Arena::count(Account account, int64_t bytes) {
  const auto i = static_cast<size_t>(account);
  usage_.now[i] += bytes;
  usage_.peak[i] = std::max(usage_.peak[i], usage_.now[i]);
  usage_.total_now += bytes;
  usage_.total_peak = std::max(usage_.total_peak, usage_.total_now);
}

Lease Arena::take(int64_t bytes, Account account) {
  const std::lock_guard lock(mutex_);
  Lease lease;
  auto& unused = unused_[bytes];
  if (!unused.empty()) {
    lease.data_ = std::move(unused.back());
    unused.pop_back();
  } else {
    try {
      lease.data_ = c10::GetAllocator(device_.type())->allocate(bytes);
    } catch (const std::exception& error) {
      throw RuntimeFault(concat("[mem::Arena::take] no memory for ", format_bytes(bytes),
                                " beside the ", format_bytes(usage_.total_now),
                                " in use on this rank: ", error.what()));
    }
  }
  lease.arena_ = this;
  lease.bytes_ = bytes;
  lease.account_ = account;
  count(account, bytes);
  return lease;
}

void Arena::give_back(Lease& lease) {
  const std::lock_guard lock(mutex_);
  count(lease.account_, -lease.bytes_);
  unused_[lease.bytes_].push_back(std::move(lease.data_));
}

Usage Arena::usage() const {
  const std::lock_guard lock(mutex_);
  return usage_;
}

void Arena::reset_peak() {
  const std::lock_guard lock(mutex_);
  usage_.peak = usage_.now;
  usage_.total_peak = usage_.total_now;
}

void Arena::trim() {
  const std::lock_guard lock(mutex_);
  unused_.clear();
}

}  // namespace penstock::mem
