#include "tests/parity/tables/children.h"

#include <fcntl.h>
#include <malloc.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <system_error>
#include <utility>

namespace penstock::tables {

namespace {

using Clock = std::chrono::steady_clock;

struct Child {
  int index = 0;
  pid_t pid = 0;
  int output = 0;
  Clock::time_point deadline;
};

[[noreturn]] void fail(const char* call) {
  throw std::system_error(errno, std::generic_category(), call);
}

Child start(int index, std::chrono::seconds timeout, const std::function<int(int)>& work) {
  std::array<int, 2> ends{};
  if (pipe2(ends.data(), O_CLOEXEC) != 0) fail("pipe2");
  std::fflush(nullptr);  // otherwise the child would print buffered text again
  const pid_t pid = fork();
  if (pid < 0) fail("fork");
  if (pid == 0) {
    dup2(ends[1], STDOUT_FILENO);
    dup2(ends[1], STDERR_FILENO);
    // Uninitialized memory reads as 3e38 instead of the zeros of a fresh process.
    mallopt(M_PERTURB, 0x80);
    std::exit(work(index));
  }
  close(ends[1]);
  return {index, pid, ends[0], Clock::now() + timeout};
}

// Returns false at the end of the output.
bool read_some(const Child& child, std::string* output) {
  std::array<char, 4096> buffer{};
  const ssize_t got = read(child.output, buffer.data(), buffer.size());
  if (got > 0) output->append(buffer.data(), static_cast<size_t>(got));
  return got > 0 || (got < 0 && errno == EINTR);
}

void reap(const Child& child, Ended* ended) {
  close(child.output);
  int status = 0;
  while (waitpid(child.pid, &status, 0) < 0)
    if (errno != EINTR) fail("waitpid");
  if (WIFSIGNALED(status)) ended->signal = WTERMSIG(status);
  if (WIFEXITED(status)) {
    ended->status = WEXITSTATUS(status);
    ended->timed_out = false;  // it ended by itself just before it would have been killed
  }
}

// Waits until a child writes output, ends or passes its deadline. Returns true for each child that
// ended.
std::vector<bool> wait_for(const std::vector<Child>& running, std::vector<Ended>* ended) {
  std::vector<pollfd> watched;
  Clock::time_point first = Clock::time_point::max();
  for (const Child& child : running) {
    watched.push_back({child.output, POLLIN, 0});
    first = std::min(first, child.deadline);
  }
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(first - Clock::now()).count();
  if (poll(watched.data(), watched.size(), static_cast<int>(std::max<int64_t>(left, 0))) < 0 &&
      errno != EINTR)
    fail("poll");
  std::vector<bool> done(running.size());
  for (size_t i = 0; i < running.size(); ++i) {
    Ended& one = (*ended)[static_cast<size_t>(running[i].index)];
    if (!one.timed_out && Clock::now() >= running[i].deadline) {
      one.timed_out = true;
      kill(running[i].pid, SIGKILL);
    }
    done[i] = one.timed_out || (watched[i].revents != 0 && !read_some(running[i], &one.output));
  }
  return done;
}

}  // namespace

std::vector<Ended> run_children(int count, int jobs, std::chrono::seconds timeout,
                                const std::function<int(int)>& work) {
  std::vector<Ended> ended(static_cast<size_t>(count));
  std::vector<Child> running;
  for (int next = 0; next < count || !running.empty();) {
    while (next < count && static_cast<int>(running.size()) < jobs)
      running.push_back(start(next++, timeout, work));
    const std::vector<bool> done = wait_for(running, &ended);
    std::vector<Child> left;
    for (size_t i = 0; i < running.size(); ++i) {
      if (done[i]) {
        reap(running[i], &ended[static_cast<size_t>(running[i].index)]);
      } else {
        left.push_back(running[i]);
      }
    }
    running = std::move(left);
  }
  return ended;
}

}  // namespace penstock::tables
