#pragma once
// Sets up shared memory for the ranks of one host. The ranks use a store to find out whether they
// can share memory. All ranks get the same answer.
#include <chrono>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "src/comm/shm/fabric.h"

namespace penstock::comm {

struct ShmMeeting {
  std::unique_ptr<ShmFabric> fabric;  // null if the ranks cannot share memory
  std::string why_not;                // the reason; the same text on all ranks
  bool one_host = true;               // false: the ranks are on several hosts
};

// [all ranks] `store` must be used for this meeting only (use a PrefixStore). Ranks are on one host
// if their kernel (boot id) and process namespace are equal. Each rank then checks that it can open
// the other processes and the memory that rank 0 made. Throws std::exception if a rank does not
// arrive within `timeout`.
ShmMeeting meet_in_memory(c10d::Store& store, int rank, int size,
                          std::chrono::milliseconds timeout);

}  // namespace penstock::comm
