#pragma once
// How the ranks of one host come to share memory: they find out through a store whether they can,
// all of them alike.
#include <chrono>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "src/comm/shm/fabric.h"

namespace penstock::comm {

struct ShmMeeting {
  std::unique_ptr<ShmFabric> fabric;  // null: they cannot
  std::string why_not;                // the same text on all ranks
  bool one_host = true;               // whether they are on one at all
};

// [all ranks] The store serves this meeting alone (a PrefixStore of its own). A host is told by its
// kernel (boot id) and process namespace, and proved: each rank opens the others' processes and the
// memory that one of them made. Throws std::exception when a rank does not come within `timeout`.
ShmMeeting meet_in_memory(c10d::Store& store, int rank, int size,
                          std::chrono::milliseconds timeout);

}  // namespace penstock::comm
