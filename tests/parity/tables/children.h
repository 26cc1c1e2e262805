#pragma once
// Work that may crash or hang, each piece in a child process of its own.
#include <chrono>
#include <functional>
#include <string>
#include <vector>

namespace penstock::tables {

struct Ended {
  int signal = 0;          // that ended it; 0 = it exited
  int status = 0;          // of its exit
  bool timed_out = false;  // it was killed
  std::string output;      // stdout and stderr
};

// Runs work(0) to work(count - 1), `jobs` at a time, in forked children whose exit status is what
// it returns; what became of each. The caller must have no thread but its own.
std::vector<Ended> run_children(int count, int jobs, std::chrono::seconds timeout,
                                const std::function<int(int)>& work);

}  // namespace penstock::tables
