#include "src/engine/model/memory_budget.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <sstream>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/device/device.h"
#include "src/engine/model/blueprint.h"
#include "src/mem/available_memory.h"

namespace penstock::engine {

std::string AvailableMemory::text() const {
  return concat(memory, " ", model, " ", disk, " ", pid, " ", device, " ", on_device, " ", when_ns,
                " ", host);
}

AvailableMemory AvailableMemory::parse(const std::string& text) {
  AvailableMemory found;
  std::istringstream words(text);
  words >> found.memory >> found.model >> found.disk >> found.pid >> found.device >>
      found.on_device >> found.when_ns >> found.host;
  PENSTOCK_ASSERT(!words.fail(), concat("cannot parse the memory that a rank found: ", text));
  return found;
}

std::vector<std::string> swap_folders(const OffloadConfig& offload) {
  if (offload.path.empty()) return {std::filesystem::temp_directory_path()};
  return split(offload.path, ':');
}

AvailableMemory find_room(const Config& config, const ModelTree& tree) {
  AvailableMemory found;
  const std::string host = host_name();
  found.host = host.empty() ? "?" : host;
  found.pid = getpid();
  found.when_ns = std::chrono::steady_clock::now().time_since_epoch().count();
  found.memory = mem::free_host_bytes();
  found.disk = mem::free_disk_bytes(swap_folders(config.offload));
  const c10::Device where = device_of(tree);
  for (const ParamInfo& info : tree.params) {
    const auto bytes = static_cast<int64_t>(info.param.nbytes());
    if (tree.init && tree.init->holds(info.param)) {  // only a part, in host memory
      found.model += tree.init->held_bytes(info.param);
    } else if (info.param.is_cpu()) {
      found.model += bytes;
    } else if (info.param.device() == where) {
      found.on_device += bytes;
    }
  }
  if (!where.is_cpu()) {
    found.device = where.index();
    const std::optional<int64_t> free = device::Device(where).free_bytes();
    found.on_device = free ? found.on_device + *free : Room::kNoLimit;
  }
  return found;
}

Room room_of(const MemoryConfig& budgets, const std::vector<AvailableMemory>& by_rank) {
  Room room = room_of(budgets);
  int64_t memory = Room::kNoLimit, on_device = Room::kNoLimit;
  for (const AvailableMemory& found : by_rank) {
    int64_t on_host = 0, sharing = 0;
    for (const AvailableMemory& other : by_rank) {
      if (other.host != found.host) continue;
      ++on_host;
      if (other.device == found.device) ++sharing;
    }
    memory = std::min(memory, found.memory / on_host + found.model);
    if (found.on_device != Room::kNoLimit) {
      on_device = std::min(on_device, found.on_device / sharing);
    }
    room.disk = std::min(room.disk, found.disk / on_host);
  }
  // If a device has its own memory, it takes none from the host.
  if (by_rank.front().device >= 0) {
    if (budgets.host_bytes < 0) room.host = memory;
    if (budgets.device_bytes < 0) room.device = on_device;
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
