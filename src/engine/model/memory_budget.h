#pragma once
// The room a run has: its budgets, and what the machines have free where no budget is set.
#include <cstdint>
#include <string>
#include <vector>

#include "penstock/core.h"
#include "penstock/plan.h"

namespace penstock::engine {

// What one rank found.
struct AvailableMemory {
  std::string host;    // name of its machine
  int64_t memory = 0;  // free in host memory
  int64_t model = 0;   // of this process's memory: parameters, which the engine takes over
  int64_t disk = 0;    // free where swap files go
  int64_t pid = 0;
  int64_t when_ns = 0;  // by its machine's clock: tells a process's engines apart

  std::string text() const;  // one line, for the other ranks
  static AvailableMemory parse(const std::string& text);
};

AvailableMemory find_room(const Config& config, const ModelTree& tree, int world_size);

// The same on every rank: ranks of a machine share what is free there, and the least counts.
Room room_of(const MemoryConfig& budgets, const std::vector<AvailableMemory>& by_rank);
// For machines that are not here: budgets alone, device and host each on its own.
Room room_of(const MemoryConfig& budgets);

// Folders of the swap files.
std::vector<std::string> swap_folders(const OffloadConfig& offload);

}  // namespace penstock::engine
