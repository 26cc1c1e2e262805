#include "src/comm/process_watch.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <c10/util/thread_name.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "src/base/text.h"

namespace penstock::comm {

namespace {

int open_process(int64_t pid) {
  return static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(pid), 0));
}

}  // namespace

bool ProcessWatch::has_ended(int64_t pid) {
  const int file = open_process(pid);
  if (file < 0) return errno == ESRCH;
  pollfd one{file, POLLIN, 0};
  poll(&one, 1, 0);
  close(file);
  return one.revents != 0;
}

ProcessWatch::ProcessWatch(const std::vector<int64_t>& pids, std::function<void(int index)> ended)
    : ended_(std::move(ended)) {
  try {
    for (size_t i = 0; i < pids.size(); ++i) {
      if (pids[i] != getpid()) open(pids[i], static_cast<int>(i));
    }
    if (watched_.empty()) return;
    wake_ = eventfd(0, EFD_CLOEXEC);
    if (wake_ < 0) throw std::runtime_error(concat("eventfd: ", std::strerror(errno)));
    thread_ = std::thread([this] {
      c10::setThreadName("penstock-peers");
      run();
    });
  } catch (const std::exception&) {
    close_all();
    throw;
  }
}

void ProcessWatch::open(int64_t pid, int index) {
  const int file = open_process(pid);
  if (file < 0) {
    throw std::runtime_error(concat("pidfd_open of process ", pid, ": ", std::strerror(errno)));
  }
  watched_.emplace_back(file, index);
}

void ProcessWatch::close_all() {
  for (const auto& [file, index] : watched_) close(file);
  watched_.clear();
  if (wake_ >= 0) close(wake_);
  wake_ = -1;
}

ProcessWatch::~ProcessWatch() {
  if (thread_.joinable()) {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(wake_, &one, sizeof(one));
    thread_.join();
  }
  close_all();
}

void ProcessWatch::run() {
  while (true) {
    // A pidfd becomes readable when its process ends.
    std::vector<pollfd> files{{wake_, POLLIN, 0}};
    for (const auto& [file, index] : watched_) files.push_back({file, POLLIN, 0});
    if (poll(files.data(), files.size(), -1) < 0) continue;  // interrupted by a signal
    if (files[0].revents != 0) return;
    for (size_t i = files.size() - 1; i > 0; --i) {
      if (files[i].revents == 0) continue;
      const auto [file, index] = watched_[i - 1];
      watched_.erase(watched_.begin() + static_cast<ptrdiff_t>(i) - 1);
      close(file);
      ended_(index);
    }
  }
}

}  // namespace penstock::comm
