#include "src/mem/available_memory.h"

#include <sys/stat.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>
#include <set>

#include "penstock/error.h"
#include "src/base/text.h"

namespace penstock::mem {

namespace {

namespace fs = std::filesystem;

// Returns the number after `name` in lines of "name number", or the only number of a file. Returns
// nothing for "max".
std::optional<int64_t> number_in(const fs::path& path, const std::string& name = "") {
  std::ifstream file(path);
  std::string word;
  if (!name.empty()) {
    while (file >> word && word != name) {
    }
  }
  int64_t number = 0;
  if (file >> number) return number;
  return std::nullopt;
}

struct CgroupFiles {
  const char *limit, *used, *cache;  // `cache`: name of the line in memory.stat
};
constexpr CgroupFiles kV2 = {"memory.max", "memory.current", "inactive_file"};
constexpr CgroupFiles kV1 = {"memory.limit_in_bytes", "memory.usage_in_bytes",
                             "total_inactive_file"};

// Returns the smallest room within the limits of a control group and its parents. Inside a
// container, `path` may be a path of the host whose files do not exist in the container. Then the
// mounted group is used.
int64_t group_leaves(const fs::path& mount, const std::string& path, const CgroupFiles& files) {
  int64_t least = std::numeric_limits<int64_t>::max();
  fs::path group = mount / fs::path(path).relative_path();
  for (bool last = false; !last; group = group.parent_path()) {
    last = group == mount || group == mount / "" || !group.has_relative_path();
    const auto limit = number_in(group / files.limit), used = number_in(group / files.used);
    if (!limit || !used) continue;
    const int64_t cache = number_in(group / "memory.stat", files.cache).value_or(0);
    least = std::min(least, std::max<int64_t>(0, *limit - *used + cache));
  }
  return least;
}

}  // namespace

int64_t free_host_bytes(const std::string& root) {
  const fs::path top = root;
  const auto available = number_in(top / "proc/meminfo", "MemAvailable:");
  if (!available)
    throw RuntimeFault("[mem::free_host_bytes] cannot read MemAvailable from /proc/meminfo");
  int64_t least = *available * 1024;
  std::ifstream groups(top / "proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const std::vector<std::string> fields = split(line, ':');  // id, controllers, path
    if (fields.size() != 3) continue;
    const std::vector<std::string> controllers = split(fields[1], ',');
    if (fields[1].empty())
      least = std::min(least, group_leaves(top / "sys/fs/cgroup", fields[2], kV2));
    if (std::find(controllers.begin(), controllers.end(), "memory") != controllers.end()) {
      least = std::min(least, group_leaves(top / "sys/fs/cgroup/memory", fields[2], kV1));
    }
  }
  return least;
}

int64_t free_disk_bytes(const std::vector<std::string>& folders) {
  int64_t sum = 0;
  std::set<dev_t> seen;
  for (const std::string& folder : folders) {
    struct stat file{};
    struct statvfs space{};
    if (stat(folder.c_str(), &file) != 0 || statvfs(folder.c_str(), &space) != 0) continue;
    if (!seen.insert(file.st_dev).second) continue;
    sum += static_cast<int64_t>(space.f_bavail) * static_cast<int64_t>(space.f_frsize);
  }
  return sum;
}

}  // namespace penstock::mem
