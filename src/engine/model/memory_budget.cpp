#include "src/engine/model/memory_budget.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <sstream>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/mem/available_memory.h"

namespace penstock::engine {

std::string AvailableMemory::text() const {
  return concat(memory, " ", model, " ", disk, " ", pid, " ", apart ? 1 : 0, " ", when_ns, " ",
                host);
}

AvailableMemory AvailableMemory::parse(const std::string& text) {
  AvailableMemory found;
  std::istringstream words(text);
  words >> found.memory >> found.model >> found.disk >> found.pid >> found.apart >> found.when_ns >>
      found.host;
  PENSTOCK_ASSERT(!words.fail(), concat("cannot parse the memory that a rank found: ", text));
  return found;
}

std::vector<std::string> swap_folders(const OffloadConfig& offload) {
  if (offload.path.empty()) return {std::filesystem::temp_directory_path()};
  return split(offload.path, ':');
}

AvailableMemory find_room(const Config& config, const ModelTree& tree, int world_size) {
  AvailableMemory found;
  const std::string host = host_name();
  found.host = host.empty() ? "?" : host;
  found.pid = getpid();
  found.when_ns = std::chrono::steady_clock::now().time_since_epoch().count();
  found.memory = mem::free_host_bytes();
  found.disk = mem::free_disk_bytes(swap_folders(config.offload));
  // A hollow parameter (penstock.init()) has only a shard on each rank.
  for (const ParamInfo& info : tree.params) {
    const bool hollow = tree.init && tree.init->holds(info.param);
    found.apart |= !info.param.is_cpu();
    if (!info.param.is_cpu()) continue;
    found.model += static_cast<int64_t>(info.param.nbytes()) / (hollow ? world_size : 1);
  }
  return found;
}

Room room_of(const MemoryConfig& budgets, const std::vector<AvailableMemory>& by_rank) {
  Room room = room_of(budgets);
  int64_t memory = Room::kNoLimit;
  for (const AvailableMemory& found : by_rank) {
    const auto on_host =
        std::count_if(by_rank.begin(), by_rank.end(),
                      [&](const AvailableMemory& other) { return other.host == found.host; });
    memory = std::min(memory, found.memory / on_host + found.model);
    room.disk = std::min(room.disk, found.disk / on_host);
  }
  // A device with memory of its own takes none from the host.
  if (by_rank.front().apart) {
    if (budgets.host_bytes < 0) room.host = memory;
  } else if (budgets.device_bytes < 0 || budgets.host_bytes < 0) {
    room.memory = budgets.host_bytes < 0 ? memory : budgets.host_bytes;
  }
  return room;
}

Room room_of(const MemoryConfig& budgets) {
  Room room;
  if (budgets.device_bytes >= 0) room.device = budgets.device_bytes;
  if (budgets.host_bytes >= 0) room.host = budgets.host_bytes;
  return room;
}

}  // namespace penstock::engine
