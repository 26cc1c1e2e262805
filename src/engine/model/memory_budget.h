#pragma once
// The room of a run: the budgets in its config, or the free memory of the machines if no budget is
// set.
#include <cstdint>
#include <string>
#include <vector>

#include "penstock/core.h"
#include "penstock/plan.h"

namespace penstock::engine {

// The memory that one rank found.
struct AvailableMemory {
  std::string host;    // name of its machine
  int64_t memory = 0;  // free in host memory
  int64_t model = 0;   // memory of the model's parameters, which the engine takes over
  int64_t disk = 0;    // free in the folders of the swap files
  int64_t pid = 0;
  int device = -1;  // index of the device, if it has memory of its own
  // Free on that device, plus the memory of the model's parameters; Room::kNoLimit if the device
  // cannot tell.
  int64_t on_device = 0;
  int64_t when_ns = 0;  // time of the steady clock; distinguishes engines of one process

  std::string text() const;  // one line, for the other ranks
  static AvailableMemory parse(const std::string& text);
};

AvailableMemory find_room(const Config& config, const ModelTree& tree);

// Returns the room of one rank, which is the same for all ranks. The ranks of a machine divide its
// free memory, and the ranks of a device divide that device's free memory. Every rank gets the
// smallest of these shares.
Room room_of(const MemoryConfig& budgets, const std::vector<AvailableMemory>& by_rank);
// Returns the room on machines whose free memory is unknown here. Only the budgets for device and
// host memory limit it.
Room room_of(const MemoryConfig& budgets);

// Returns the folders of the swap files.
std::vector<std::string> swap_folders(const OffloadConfig& offload);

}  // namespace penstock::engine
