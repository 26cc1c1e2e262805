#include "src/comm/watchdog.h"

#include <c10/util/thread_name.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "src/base/text.h"

namespace penstock::comm {

Watchdog::Watchdog(int rank, int size, const WatchOptions& options, Say say)
    : board_(rank, size, options.report_dir), warn_(options.warn), say_(std::move(say)) {
  if (size > 1 && warn_.count() > 0) start();
}

void Watchdog::start() {
  thread_ = std::thread([this] {
    c10::setThreadName("penstock-watch");
    run();
  });
}

void Watchdog::look_at(Look also) {
  {
    const std::lock_guard lock(mutex_);
    also_ = std::move(also);
    renewed_ = true;
    changed_.notify_all();
  }
  if (!thread_.joinable()) start();
}

Watchdog::~Watchdog() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void Watchdog::to_stderr(const std::string& line) { std::fputs(line.c_str(), stderr); }

void Watchdog::run() {
  std::unique_lock lock(mutex_);
  while (!closing_) {
    // look() and `also` run without the lock, because `also` may end exchanges, which takes other
    // locks.
    const Look also = also_;
    renewed_ = false;
    lock.unlock();
    std::chrono::milliseconds quiet = std::chrono::hours(1);
    if (also) quiet = also();
    if (warn_.count() > 0) quiet = std::min(quiet, look());
    lock.lock();
    changed_.wait_for(lock, quiet, [this] { return closing_ || renewed_; });
  }
}

std::chrono::milliseconds Watchdog::look() {
  const RankStatus status = board_.status();
  const double warn_s = std::chrono::duration<double>(warn_).count();
  double quiet_s = warn_s;
  for (const RankStatus::Lane& lane : status.lanes) {
    if (!lane.waits) continue;
    const auto warned = warned_.find(lane.name);
    // Each collective gets one warning, however long it takes.
    if (warned != warned_.end() && warned->second == lane.sequence) continue;
    if (lane.line.age_s < warn_s) {
      quiet_s = std::min(quiet_s, warn_s - lane.line.age_s);
      continue;
    }
    warned_[lane.name] = lane.sequence;
    const bool disk = lane.name == kDiskLane;
    const std::string peer = lane.peer < 0 ? "its peers" : concat("rank ", lane.peer);
    const std::string whom = disk ? "the disk" : peer;
    say_(concat("penstock: rank ", status.rank, ", step ", disk ? status.at.step : lane.line.step,
                ": waiting ", static_cast<int64_t>(lane.line.age_s), " s for ", whom, " in `",
                lane.line.text, "`; `penstock status ", status.pid, "` shows all ranks\n"));
  }
  // The time is rounded up, so that the wait is due at the next call.
  return std::chrono::milliseconds(static_cast<int64_t>(quiet_s * 1e3) + 1);
}

}  // namespace penstock::comm
