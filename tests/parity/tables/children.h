#pragma once
// Runs work that may crash or hang, each piece in its own child process.
#include <chrono>
#include <functional>
#include <string>
#include <vector>

namespace penstock::tables {

struct Ended {
  int signal = 0;          // the signal that ended the child; 0 = the child exited
  int status = 0;          // its exit status
  bool timed_out = false;  // the child was killed
  std::string output;      // stdout and stderr
};

// Runs work(0) to work(count - 1), `jobs` at a time, in forked children. The result of work() is
// the child's exit status. Returns how each child ended. The process must have no other threads.
std::vector<Ended> run_children(int count, int jobs, std::chrono::seconds timeout,
                                const std::function<int(int)>& work);

}  // namespace penstock::tables
